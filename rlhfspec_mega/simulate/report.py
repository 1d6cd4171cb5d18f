"""Results of simulations as table rows, plain data and a plot; every value is marked as simulated."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhfspec_mega.observe.plot import drawing
from rlhfspec_mega.simulate.rollout import SimulatedRollout

BASE = "static"
INSTANTS = 120  # number of times at which live samples are recorded


@dataclass(frozen=True)
class Case:
    """What was simulated, apart from the seed."""

    engines: int
    lengths: str
    start: str
    mechanism: str

    @property
    def setting(self) -> tuple[int, str, str]:
        """Everything but the mechanism; mechanisms are compared within one setting."""
        return self.engines, self.lengths, self.start


# Heading (below "simulated"), key in the JSON file, digits after the decimal point.
COLUMNS = (
    ("rollout s", "makespan", 1),
    ("/ static", "makespan_over_static", 3),
    ("/ bound", "makespan_over_bound", 3),
    ("+ scoring s", "makespan_with_scoring", 1),
    ("/ static", "makespan_with_scoring_over_static", 3),
    ("freed dev-s", "freed_device_seconds", 0),
    ("used dev-s", "used_device_seconds", 0),
    ("migrations", "migrations", 0),
)
_WIDTHS = (8, 10, 8, 30)  # of the columns that describe the case
_WIDTH = 12  # of the columns with values


def figures(result: SimulatedRollout, bound: float) -> dict[str, float]:
    """The scalar results of one simulation; `bound`: a lower bound of its makespan."""
    names = (
        "makespan",
        "makespan_with_scoring",
        "freed_device_seconds",
        "used_device_seconds",
        "fused_tasks",
        "migrations",
        "overtaken",
        "handed_over",
        "refused",
        "kv_peak",
    )
    found = {name: float(getattr(result, name)) for name in names}
    return found | {"lower_bound": bound, "makespan_over_bound": result.makespan / bound}


def medians_over_seeds(runs: Sequence[dict[str, float]], base: Sequence[dict[str, float]] | None) -> dict[str, float]:
    """Medians over seeds. With a base (the static mechanism), also medians of the ratios to it at the same seed."""
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    if base:
        for name in ("makespan", "makespan_with_scoring"):
            ratios = (run[name] / other[name] for run, other in zip(runs, base, strict=True))
            medians[f"{name}_over_static"] = statistics.median(ratios)
    return medians


def heading() -> str:
    """The two heading lines of the table."""
    marks = _left([""] * len(_WIDTHS)) + "simulated".rjust(_WIDTH) * len(COLUMNS)
    names = _left(("engines", "lengths", "start", "mechanism"))
    return f"{marks}\n{names}" + "".join(name.rjust(_WIDTH) for name, _, _ in COLUMNS)


def row(case: Case, medians: dict[str, float]) -> str:
    """One row of the table."""
    values = (f"{medians[key]:.{digits}f}" if key in medians else "-" for _, key, digits in COLUMNS)
    words = (case.engines, case.lengths, case.start, case.mechanism)
    return _left(words) + "".join(value.rjust(_WIDTH) for value in values)


def _left(words: Sequence[object]) -> str:
    return "".join(str(word).ljust(width) for word, width in zip(words, _WIDTHS, strict=True))


def live_record(result: SimulatedRollout) -> dict[str, Any]:
    """Numbers over time of live samples, in total and by engine, and of engines that decode."""
    times = np.linspace(0.0, result.makespan, INSTANTS).tolist()
    counts = result.live.at(times)
    return {
        "simulated_seconds": times,
        "samples": counts.sum(axis=1).tolist(),
        "engines_that_decode": (counts > 0).sum(axis=1).tolist(),
        "samples_by_engine": counts.T.tolist(),
    }


def plot(medians: dict[Case, dict[str, float]], live: dict[Case, dict[str, Any]], path: Path) -> None:
    """Write a PNG: makespans relative to static, and live samples over time in the largest setting."""
    settings = list(dict.fromkeys(case.setting for case in medians))
    mechanisms = list(dict.fromkeys(case.mechanism for case in medians))
    with drawing(path, 2, 2, figsize=(15, 9)) as (figure, axes):
        for axis, name in zip(axes[0], ("makespan", "makespan_with_scoring"), strict=True):
            for number, mechanism in enumerate(mechanisms):
                heights = [medians[Case(*s, mechanism)].get(f"{name}_over_static", float("nan")) for s in settings]
                width = 0.8 / len(mechanisms)
                axis.bar(np.arange(len(settings)) + (number + 0.5) * width - 0.4, heights, width, label=mechanism)
            axis.axhline(1.0, color="black", linewidth=0.8)
            axis.set_xticks(
                range(len(settings)), ["\n".join(map(str, setting)) for setting in settings], fontsize="small"
            )
            axis.set_ylabel(f"simulated {name.replace('_', ' ')} over static")
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        largest = max(settings)
        for axis, name in zip(axes[1], ("samples", "engines_that_decode"), strict=True):
            for mechanism in mechanisms:
                record = live[Case(*largest, mechanism)]
                axis.plot(record["simulated_seconds"], record[name], label=mechanism)
            axis.set_xlabel("simulated seconds")
            axis.set_ylabel(f"simulated {'live samples' if name == 'samples' else 'engines that decode'}")
            axis.set_title("simulated: {} engines, {}, {} start".format(*largest), fontsize="medium")
        axes[1, 0].set_yscale("symlog")
