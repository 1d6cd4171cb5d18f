"""Where a run stands, from its files alone, whether it goes on or has ended.

    python -m tools.status outputs/tiny
    python -m tools.status outputs/tiny --json

Shows the step and the phase, rates, the time to the end, the last checkpoint, and which phases take the time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from rlhfspec_mega.checkpoints.directory import CheckpointDirectory
from rlhfspec_mega.config.output_dir import CHECKPOINTS, CONFIG_FILE, holder
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.observe.json_lines import text_lines
from rlhfspec_mega.observe.metrics import TIMING
from rlhfspec_mega.observe.progress import read_progress
from rlhfspec_mega.observe.run_log import METRICS_FILE
from rlhfspec_mega.observe.summary import SUMMARY_FILE

RECENT = 10  # steps that rates and shares are taken from
UNUSUAL = 3.0  # a phase that has lasted so many times its usual time is pointed out
STALE_SECONDS = 5.0  # shorter phases are not pointed out


@dataclass(frozen=True)
class Status:
    """Where a run stands.

    Attributes:
        state: "runs", "finished" or "stopped".
        process: who runs it, e.g. "process 17 on node3".
        step, steps: finished steps, and those of the whole run.
        phase, phase_seconds: what it does now, and for how long; None unless it runs.
        step_seconds: median time of a recent step, from one to the next.
        tokens_per_second: median generation rate of recent steps.
        seconds_left: to the end, if steps go on taking as long.
        checkpoint: step of the newest checkpoint.
        checkpoint_age: seconds since it was written.
        phases: share of recent steps' time by phase, largest first.
        notes: what a person should look at.
    """

    state: str
    process: str | None
    step: int
    steps: int
    phase: str | None
    phase_seconds: float | None
    reward: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    seconds_left: float | None
    checkpoint: int | None
    checkpoint_age: float | None
    phases: dict[str, float]
    notes: list[str]


def status(run: Path, now: float) -> Status:
    """Read the status of the run in this directory. Raises UserError if it holds no run."""
    config = _config(run)
    rows = _rows(run / METRICS_FILE)
    steps = int(config["trainer"]["steps"])
    done = min(len(rows), steps)
    recent = rows[:steps][-RECENT:]
    process = holder(run)
    ended = done == steps and (run / SUMMARY_FILE).is_file()
    state = "runs" if process else "finished" if ended else "stopped"
    progress = read_progress(run) if process else None
    seconds = _step_seconds(rows[:steps])
    checkpoints = CheckpointDirectory(run / CHECKPOINTS)
    newest = max(checkpoints.steps(), default=None)
    written = checkpoints.path(newest).stat().st_mtime if newest is not None else None
    in_phase = now - progress.since if progress else None
    return Status(
        state=state,
        process=process,
        step=done,
        steps=steps,
        phase=(progress.phase if progress else "starting") if process else None,
        phase_seconds=in_phase,
        reward=_median(row.get("rollout/reward_mean") for row in recent),
        step_seconds=seconds,
        tokens_per_second=_median(row.get("perf/generation_tokens_per_second") for row in recent),
        seconds_left=seconds * (steps - done) if process and seconds is not None else None,
        checkpoint=newest,
        checkpoint_age=now - written if written is not None else None,
        phases=_shares(recent),
        notes=_notes(run, config, state, rows, newest, progress.phase if progress else "", in_phase),
    )


def _config(run: Path) -> dict[str, Any]:
    if not run.is_dir():
        raise UserError(f"There is no directory {run}: give the directory of a run, e.g. outputs/tiny.")
    try:
        config = yaml.safe_load((run / CONFIG_FILE).read_text(encoding="utf-8"))
        int(config["trainer"]["steps"])
    except (OSError, yaml.YAMLError, TypeError, KeyError, ValueError, OverflowError):
        raise UserError(f"{run} holds no run: its {CONFIG_FILE} is missing or cannot be read.") from None
    return config


def _rows(file: Path) -> list[dict[str, float]]:
    """The metrics of the finished steps, numbers only.

    The last line may be half written while the run goes on; what else is no number is damaged, and the rest still says
    where the run stands.
    """
    rows = []
    for line in text_lines(file) if file.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append({name: value for name, value in row.items() if _finite(value)})
    return rows


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _median(values: Any) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def _step_seconds(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Median time between the ends of recent steps; that of the phases while there is only one step."""
    times = [row["time"] for row in rows[-RECENT - 1 :] if "time" in row]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times) if later > earlier]
    if gaps:
        return statistics.median(gaps)
    return sum(_phases(rows[-1]).values()) if rows else None


def _phases(row: Mapping[str, Any]) -> dict[str, float]:
    return {name.removeprefix(TIMING): value for name, value in row.items() if name.startswith(TIMING)}


def _shares(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for row in rows:
        for name, seconds in _phases(row).items():
            totals[name] = totals.get(name, 0.0) + seconds
    whole = sum(totals.values())
    ordered = sorted(totals.items(), key=lambda one: -one[1])
    return {name: seconds / whole for name, seconds in ordered} if whole else {}


def _notes(
    run: Path,
    config: Mapping[str, Any],
    state: str,
    rows: Sequence[Mapping[str, Any]],
    newest: int | None,
    phase: str,
    in_phase: float | None,
) -> list[str]:
    notes = []
    usual = _median(_phases(row).get(phase) for row in rows[-RECENT:])
    if in_phase is not None and usual and in_phase > max(UNUSUAL * usual, STALE_SECONDS):
        notes.append(f"{phase} has lasted {in_phase:.0f} s, and usually takes {usual:.1f} s: look into {run / 'logs'}.")
    if reports := sorted((run / "logs").glob("stacks-*.txt")):
        notes.append(f"A worker hung or died: {reports[-1]} says what each process did.")
    if skipped := sum(row.get("actor/skipped_updates", 0) for row in rows):
        notes.append(f"{skipped:.0f} updates were left out because a gradient was not finite.")
    if state == "stopped":
        name, parent = run.name, run.parent
        after = f"after step {newest}" if newest is not None else "from the beginning"
        notes.append(
            f"It has stopped before its end: the same command with output_dir={parent} name={name} trainer.resume=true "
            f"goes on {after}."
        )
    elif state == "runs" and newest is None and config["trainer"].get("checkpoint_every") == 0:
        notes.append("It writes no checkpoints: trainer.checkpoint_every=0.")
    return notes


def in_words(run: Path, found: Status) -> str:
    """The status as a person reads it."""
    lines = [f"{run}: {found.state}" + (f" ({found.process})" if found.process else "")]
    share = found.step / found.steps if found.steps else 1.0
    doing = ""
    if found.phase is not None:
        doing = f", now: {found.phase}"
        doing += f" for {_duration(found.phase_seconds)}" if found.phase_seconds is not None else ""
    lines.append(f"  step          {found.step} of {found.steps} ({share:.0%}){doing}")
    if found.step_seconds is not None:
        lines.append(f"  a step takes  {_duration(found.step_seconds)}")
    if found.tokens_per_second is not None:
        lines.append(f"  generation    {found.tokens_per_second:,.0f} tokens/s")
    if found.reward is not None:
        lines.append(f"  reward        {found.reward:.3f}")
    if found.seconds_left is not None:
        lines.append(f"  to the end    {_duration(found.seconds_left)}")
    if found.checkpoint is None:
        lines.append("  checkpoint    none")
    else:
        assert found.checkpoint_age is not None
        lines.append(f"  checkpoint    after step {found.checkpoint}, {_duration(found.checkpoint_age)} ago")
    if found.phases:
        largest = [f"{name} {part:.0%}" for name, part in found.phases.items() if part >= 0.05]
        lines.append(f"  time goes to  {', '.join(largest)}")
    return "\n".join([*lines, *(f"  ! {note}" for note in found.notes)])


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="directory of a run, e.g. outputs/tiny")
    parser.add_argument("--json", action="store_true", help="print one JSON object: seconds, shares of 1")
    arguments = parser.parse_args()
    try:
        found = status(arguments.run, time.time())
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print(json.dumps(asdict(found), indent=1) if arguments.json else in_words(arguments.run, found))


if __name__ == "__main__":
    main()
