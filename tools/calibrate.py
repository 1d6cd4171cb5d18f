"""Measured costs of a run's phases, from its files alone, for the times that dry_run= predicts.

    python -m tools.calibrate outputs/tiny --out costs.json
    python train.py cluster.costs=costs.json dry_run=true

The run must have the model, the layout and the engine of the runs to be predicted; numbers of prompts, samples and
engines may differ.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlhfspec_mega.simulate.step_calibrate import measured_costs
from rlhfspec_mega.simulate.step_costs import write_costs
from tools.command import exit_status


def main() -> int:
    arguments = _parser().parse_args()

    def work() -> None:
        write_costs(measured_costs(arguments.run), arguments.out)
        print(f"{arguments.out}: python train.py cluster.costs={arguments.out} dry_run=true uses it.")

    return exit_status(work)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.calibrate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="directory of a run that has ended")
    parser.add_argument("--out", type=Path, default=Path("costs.json"), help="file to write (default: costs.json)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
