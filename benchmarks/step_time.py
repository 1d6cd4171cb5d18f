"""Predicted against measured phases of a step: python -m benchmarks.step_time [--repeats 3] [options of the runs].

Each repeat makes two runs with different prompts, one after the other. The costs of the first (tools.calibrate) predict
the second, of which the median of ten steps counts. The refresh of the draft, which comes every fourth step, counts
with its mean over twelve. The first step of a run is left out: engines measure their own costs in it.
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
        refreshes = name == f"{SECONDS}draft"
        found[name.removeprefix(SECONDS)] = statistics.fmean(values) if refreshes else statistics.median(values[:STEPS])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/step_time_cpu.json"))
    parser.add_argument("options", nargs="*", help="options of all runs")
    arguments = parser.parse_args()
    config = load_config(arguments.options)
    _, sizes = shape_and_sizes(config)
    results = []
    for repeat in range(arguments.repeats):
        with tempfile.TemporaryDirectory() as place:
            first = run(Path(place), "first", [f"seed={2 * repeat + 1}", *arguments.options])
            costs, calibrated = measured_costs(first), measured(first)
            real = measured(run(Path(place), "second", [f"seed={2 * repeat + 2}", *arguments.options]))
        predicted = forecast_step(config, sizes, costs).seconds
        results.append({"predicted": dict(predicted), "measured": real, "calibrated": calibrated})
        total = sum(real.values())
        for phase, seconds in real.items():
            if seconds > COUNTED * total:
                guess = predicted.get(phase, 0.0)
                print(
                    f"{repeat + 1} {phase:<10} {seconds:6.3f} s, predicted {guess:6.3f} s: {guess / seconds:.2f}  "
                    f"(calibrated from a run with {calibrated.get(phase, 0.0):.3f} s)"
                )
        print(f"{repeat + 1} {'all':<10} {total:6.3f} s, predicted {sum(predicted.values()):6.3f} s", flush=True)
    arguments.out.write_text(json.dumps({"options": arguments.options, "repeats": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
