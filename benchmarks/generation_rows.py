"""The rows of the generation benchmark: a scenario with the times of every policy. They are saved as they end."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contenders import ADAPTIVE, FAMILIES, PUBLISHED, Contender
from benchmarks.paired import Interval, interleaved, ratio_interval
from benchmarks.scenarios import Bench, Scenario

Row = dict[str, Any]


class Rows:
    """Rows in a file of JSON lines, of which the first one has the conditions; an interrupted run goes on with it.

    Args:
        conditions: rows that were measured under others are put aside, in a file that ends with `.old`.
    """

    def __init__(self, path: Path, conditions: dict[str, Any]) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        known = list(_whole_lines(path)) if path.exists() else []
        self.found: list[Row] = []
        if known and known[0] == json.loads(json.dumps(conditions)):
            self.found = known[1:]
        elif known:
            path.rename(path.with_name(f"{path.name}.old"))
        lines = (json.dumps(line) + "\n" for line in [conditions, *self.found])
        path.write_text("".join(lines), encoding="utf-8")

    def row(self, scenario: Scenario) -> Row | None:
        """The row of a scenario, if it was measured."""
        return next((row for row in self.found if row["scenario"]["name"] == scenario.name), None)

    def add(self, row: Row) -> None:
        self.found.append(row)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _whole_lines(path: Path) -> Iterator[Any]:
    """What the lines hold, up to one that was not written to its end."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def measure(bench: Bench, scenario: Scenario, repeats: tuple[int, int], all_of: Sequence[Contender]) -> Row:
    """Seconds of the settings while selecting, the setting selected per family, and their seconds while judged.

    Args:
        repeats: how many of each.
    """
    by_name = {contender.name: contender for contender in all_of}
    selecting = _interleave(bench, scenario, all_of, repeats[0], first=0)
    selected = {}
    for family in FAMILIES:
        names = [contender.name for contender in all_of if contender.family == family]
        selected[family] = min(names, key=lambda name: statistics.median(selecting[name]))
    for contender in all_of:
        if contender.family == ADAPTIVE:
            bench.gains(contender, scenario)  # of what was selected from
    judged = list(dict.fromkeys([*selected.values(), *PUBLISHED]))
    judging = _interleave(bench, scenario, [by_name[name] for name in judged], repeats[1], first=repeats[0] + 1)
    gains = bench.gains(by_name[selected[ADAPTIVE]], scenario)
    return {
        "scenario": asdict(scenario), "selecting": selecting, "selected": selected, "judging": judging, "gains": gains
    }  # fmt: skip


def ratios(row: Row) -> dict[str, Interval]:
    """Time of each family's selected setting over adaptive's, repeat by repeat."""
    judging, ours = row["judging"], row["judging"][row["selected"][ADAPTIVE]]
    families = {family: judging[name] for family, name in row["selected"].items() if family != ADAPTIVE}
    families |= {name: judging[name] for name in PUBLISHED}
    return {family: ratio_interval(times, ours) for family, times in families.items()}


def regret(row: Row) -> float:
    """Share of adaptive's time that the row's best setting would have saved.

    The setting is the best of every second repeat, and judged by the others; and the other way round.
    """
    judging, ours = row["judging"], row["judging"][row["selected"][ADAPTIVE]]
    found = []
    for half in (0, 1):
        best = min(judging, key=lambda name: statistics.median(judging[name][half::2]))
        pairs = zip(judging[best][1 - half :: 2], ours[1 - half :: 2], strict=True)
        found.append(1.0 - statistics.median(theirs / own for theirs, own in pairs))
    return statistics.mean(found)


def print_row(row: Row) -> None:
    """One line per family: selected setting, tokens per second, time over adaptive's."""
    tokens, judging = sum(row["scenario"]["lengths"]), row["judging"]
    over = ratios(row)
    for family, name in [*row["selected"].items(), *((name, name) for name in PUBLISHED)]:
        rate = tokens / statistics.median(judging[name])
        print(f"  {family:<20} {name:<22} {rate:>8.0f} tokens/s  {over.get(family, '')}", flush=True)
    print(f"  regret {regret(row):+.3f}; gains by mode: {row['gains']}", flush=True)


def _interleave(
    bench: Bench, scenario: Scenario, these: Sequence[Contender], repeats: int, first: int
) -> dict[str, list[float]]:
    """Seconds by name; every repeat has prompts and noise of its own, from number `first` on."""
    runs = dict.fromkeys((contender.name for contender in these), first)

    def once(contender: Contender) -> float:
        repeat = runs[contender.name]
        runs[contender.name] += 1
        return bench.run(contender, scenario, repeat)

    return interleaved({contender.name: partial(once, contender) for contender in these}, repeats)
