"""Predicted against measured phases of a step: python -m benchmarks.step_time [--repeats 3] [options of the runs].

Runs with different prompts follow each other. The costs (tools.calibrate) of the runs before and after one predict it,
with the mean of both, since a machine's pace drifts by a tenth and more within a minute. Of the predicted run the
median of ten steps counts. The refresh of the draft, which comes every fourth step or more seldom, and the log-prob
pass, which steps without one may leave out, count with their means over twelve.
The first step of a run is left out: engines measure their own costs in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.config.sizes import shape_and_sizes
from rlhfspec_mega.simulate.step import forecast_step
from rlhfspec_mega.simulate.step_calibrate import measured_costs

STEPS = 10
COUNTED = 0.05  # share of a step from which on a phase is reported
SECONDS = "timing_s/"
NOT_IN_ALL = ("draft", "logprobs")  # phases that some steps leave out


def run(directory: Path, name: str, options: list[str]) -> Path:
    """A run of the demo without evaluations; returns its directory."""
    command = [sys.executable, "train.py", f"output_dir={directory}", f"name={name}", f"trainer.steps={STEPS + 3}"]
    command += ["trainer.eval_every=0", "trainer.export=false", "logger.tensorboard=false", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return directory / name


def measured(directory: Path) -> dict[str, float]:
    """Seconds of a step by phase."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()][1:-1]
    phases = {name for row in rows for name in row if name.startswith(SECONDS)}
    found = {}
    for name in sorted(phases):
        values = [row.get(name, 0.0) for row in rows]
        phase = name.removeprefix(SECONDS)
        found[phase] = statistics.fmean(values) if phase in NOT_IN_ALL else statistics.median(values[:STEPS])
    return found


def mean_of(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {phase: (one.get(phase, 0.0) + other.get(phase, 0.0)) / 2 for phase in one | other}


def report(repeat: int, predicted: dict[str, float], real: dict[str, float], calibrated: dict[str, float]) -> None:
    """Print the phases that count."""
    total = sum(real.values())
    for phase, seconds in real.items():
        if seconds > COUNTED * total:
            guess = predicted.get(phase, 0.0)
            print(
                f"{repeat} {phase:<10} {seconds:6.3f} s, predicted {guess:6.3f} s: {guess / seconds:.2f}  "
                f"(calibrated from runs with {calibrated.get(phase, 0.0):.3f} s)"
            )
    print(f"{repeat} {'all':<10} {total:6.3f} s, predicted {sum(predicted.values()):6.3f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/step_time_cpu.json"))
    parser.add_argument("options", nargs="*", help="options of all runs")
    arguments = parser.parse_args()
    config = load_config(arguments.options)
    _, sizes = shape_and_sizes(config)
    results: list[dict[str, dict[str, float]]] = []

    def calibrated(number: int, place: Path) -> tuple[dict[str, float], dict[str, float]]:
        """What a run predicts, and its own phases."""
        directory = run(place, f"calibrated{number}", [f"seed={2 * number + 1}", *arguments.options])
        return dict(forecast_step(config, sizes, measured_costs(directory)).seconds), measured(directory)

    with tempfile.TemporaryDirectory() as place:
        before = calibrated(0, Path(place))
        for repeat in range(1, arguments.repeats + 1):
            real = measured(run(Path(place), f"predicted{repeat}", [f"seed={2 * repeat}", *arguments.options]))
            after = calibrated(repeat, Path(place))
            predicted, neighbours = (mean_of(*pair) for pair in zip(before, after, strict=True))
            results.append({"predicted": predicted, "measured": real, "calibrated": neighbours})
            report(repeat, predicted, real, neighbours)
            before = after
    arguments.out.write_text(json.dumps({"options": arguments.options, "repeats": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
