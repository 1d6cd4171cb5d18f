"""Runs that save in the background and in the foreground, in turns: python -m benchmarks.checkpoints [--repeats 5].

20 steps of the demo, a checkpoint every five. The pause of a save is the time that the run's phase "checkpoint" takes
in the step after it, and the total is that of all steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.paired import median_interval

EVERY, STEPS = 5, 20
VARIANTS = {"background": "true", "foreground": "false"}


def run(directory: Path, background: str, options: list[str]) -> tuple[list[float], float]:
    """Pauses of the saves in seconds, and seconds of all steps."""
    command = [sys.executable, "train.py", f"output_dir={directory}", "name=run", f"trainer.async_save={background}"]
    command += [f"trainer.steps={STEPS + 1}", f"trainer.checkpoint_every={EVERY}", "trainer.eval_every=0"]
    command += ["trainer.export=false", "logger.tensorboard=false", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if 0 < row["step"] <= STEPS]  # the first step measures costs
    pauses = [row["timing_s/checkpoint"] for row in rows if row["step"] % EVERY == 0]
    return pauses, sum(value for row in rows for name, value in row.items() if name.startswith("timing_s/"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/checkpoints_cpu.json"))
    parser.add_argument("options", nargs="*", help="options of both runs")
    arguments = parser.parse_args()
    pauses: dict[str, list[float]] = {name: [] for name in VARIANTS}
    totals: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for repeat in range(arguments.repeats):
        order = list(VARIANTS.items())
        for name, background in order if repeat % 2 == 0 else order[::-1]:
            with tempfile.TemporaryDirectory() as directory:
                found, total = run(Path(directory), background, arguments.options)
            pauses[name] += found
            totals[name].append(total)
            print(f"{repeat + 1} {name:<10} pause {statistics.median(found) * 1e3:6.1f} ms, {total:.2f} s", flush=True)
    ratio = statistics.median(pauses["background"]) / statistics.median(pauses["foreground"])
    quotients = [a / b for a, b in zip(totals["background"], totals["foreground"], strict=True)]
    print(f"Pause: {ratio:.2f} of the foreground's. All steps: {median_interval(quotients)} of its time.")
    result = {"pauses": pauses, "totals": totals, "pause_ratio": ratio, "options": arguments.options}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
