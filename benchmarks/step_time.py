"""Predicted against measured phases of a step: python -m benchmarks.step_time [--repeats 6] [options of the runs].

Runs with different prompts follow each other. The costs (tools.calibrate) of the runs before and after one predict it,
with the mean of both, since a machine's pace drifts by a tenth and more within a minute. Of the predicted run the
median of ten steps counts; of the reference's work after a rollout the mean, which is what is predicted. The refresh of
the draft, which comes every fourth step or more seldom, and the log-prob pass, which steps without one may leave out,
count with their means over twelve.
The first step of a run is left out: engines measure their own costs in it.

A median of ten steps is itself uncertain where a phase varies from step to step; its interval is printed (the sign
test's, see `benchmarks.paired`). At the end the same is printed for the ten steps of all repeats together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.paired import median_interval
from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.config.sizes import shape_and_sizes
from rlhfspec_mega.simulate.step import forecast_step
from rlhfspec_mega.simulate.step_calibrate import measured_costs

STEPS = 10
COUNTED = 0.05  # share of a step from which on a phase is reported
SECONDS = "timing_s/"
NOT_IN_ALL = ("draft", "logprobs")  # phases that some steps leave out
BY_MEAN = (*NOT_IN_ALL, "reference")


def run(directory: Path, name: str, options: list[str]) -> Path:
    """A run of the demo without evaluations; returns its directory."""
    command = [sys.executable, "train.py", f"output_dir={directory}", f"name={name}", f"trainer.steps={STEPS + 3}"]
    command += ["trainer.eval_every=0", "trainer.export=false", "logger.tensorboard=false", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return directory / name


def measured(directory: Path) -> dict[str, list[float]]:
    """Seconds of the steps that count, by phase."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()][1:-1]
    phases = {name for row in rows for name in row if name.startswith(SECONDS)}
    found = {name.removeprefix(SECONDS): [float(row.get(name, 0.0)) for row in rows] for name in sorted(phases)}
    return {phase: values if phase in NOT_IN_ALL else values[:STEPS] for phase, values in found.items()}


def typical(phase: str, values: Sequence[float]) -> float:
    """What counts of a phase's seconds."""
    return statistics.fmean(values) if phase in BY_MEAN else statistics.median(values)


def mean_of(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {phase: (one.get(phase, 0.0) + other.get(phase, 0.0)) / 2 for phase in one | other}


def report(repeat: str, predicted: dict[str, float], real: dict[str, list[float]]) -> None:
    """Print the phases that count."""
    seconds = {phase: typical(phase, values) for phase, values in real.items()}
    total = sum(seconds.values())
    for phase in seconds:
        if seconds[phase] > COUNTED * total:
            guess, interval = predicted.get(phase, 0.0), median_interval(real[phase])
            known = "" if phase in BY_MEAN else f"  [{interval.low:.3f}, {interval.high:.3f}]"
            ratio = guess / seconds[phase]
            print(f"{repeat:<3} {phase:<10} {seconds[phase]:6.3f} s, predicted {guess:6.3f} s: {ratio:.2f}{known}")
    print(f"{repeat:<3} {'step':<10} {total:6.3f} s, predicted {sum(predicted.values()):6.3f} s", flush=True)


def report_all(results: Sequence[tuple[dict[str, float], dict[str, list[float]]]]) -> None:
    """Print the means of all predictions against the steps of all repeats."""
    predictions = [predicted for predicted, _ in results]
    phases = sorted({phase for predicted in predictions for phase in predicted})
    measured_ones = sorted({phase for _, real in results for phase in real})
    pooled = {phase: [value for _, real in results for value in real.get(phase, [])] for phase in measured_ones}
    mean = {phase: statistics.fmean(one.get(phase, 0.0) for one in predictions) for phase in phases}
    report("all", mean, pooled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/step_time_cpu.json"))
    parser.add_argument("options", nargs="*", help="options of all runs")
    arguments = parser.parse_args()
    config = load_config(arguments.options)
    _, sizes = shape_and_sizes(config)
    results: list[tuple[dict[str, float], dict[str, list[float]]]] = []

    def prediction(number: int, place: Path) -> dict[str, float]:
        """What a run predicts."""
        directory = run(place, f"calibrated{number}", [f"seed={2 * number + 1}", *arguments.options])
        return dict(forecast_step(config, sizes, measured_costs(directory)).seconds)

    with tempfile.TemporaryDirectory() as place:
        before = prediction(0, Path(place))
        for repeat in range(1, arguments.repeats + 1):
            real = measured(run(Path(place), f"predicted{repeat}", [f"seed={2 * repeat}", *arguments.options]))
            after = prediction(repeat, Path(place))
            results.append((mean_of(before, after), real))
            report(str(repeat), *results[-1])
            before = after
    report_all(results)
    repeats = [{"predicted": predicted, "measured": real} for predicted, real in results]
    arguments.out.write_text(json.dumps({"options": arguments.options, "repeats": repeats}, indent=1) + "\n")


if __name__ == "__main__":
    main()
