"""Simulate rollouts on any number of engines, with and without each mechanism: no model, no engine, the real planning.

    python -m tools.simulate --engines 8 64 256 --lengths chat reasoning --curve h200-8b --seeds 3 --out DIR

Writes DIR/simulated.json (all figures, the cost curves and where they come from) and DIR/simulated.png. Cost curves
are a preset computed from a roofline, or a JSON file that rlhfspec_mega.simulate.calibrate made from a real run.
Ratios are to plain `static`. Mechanism `queue` hands out samples as slots free up, whatever the start: where all have a
slot at once it only deals them one by one; --slots below --samples-per-engine makes it wait.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.simulate import report
from rlhfspec_mega.simulate.curves import CostCurves, read_curves
from rlhfspec_mega.simulate.mechanisms import MECHANISMS, simulate
from rlhfspec_mega.simulate.report import Case
from rlhfspec_mega.simulate.roofline import TARGETS, roofline
from rlhfspec_mega.simulate.workload import LENGTH_LAWS, STARTS, Workload, draw_workload

MOST_ENGINES = 1024
RESULT_FILE, PLOT_FILE = "simulated.json", "simulated.png"
EARLIER_SEED = 10**6  # seeds of earlier rollouts, apart from those of the simulated ones


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[:1].upper()}{message[1:]}: see python -m tools.simulate --help.")


def main(words: list[str] | None = None) -> int:
    try:
        arguments = _parse(words)
        run(arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def run(arguments: argparse.Namespace) -> None:
    """Simulate every combination that was asked for; prints rows as they are done, then writes the files."""
    curves = _curves(arguments)
    print(f"Simulated. Cost curves: {curves.name} ({curves.source['kind']}).", report.heading(), sep="\n", flush=True)
    medians: dict[Case, dict[str, float]] = {}
    live: dict[Case, dict[str, Any]] = {}
    runs: list[dict[str, Any]] = []
    for engines in arguments.engines:
        for lengths in arguments.lengths:
            for start in arguments.starts:
                base = None
                for mechanism in arguments.mechanisms:
                    case = Case(engines, lengths, start, mechanism)
                    found, live[case] = _simulate_case(case, curves, arguments)
                    runs += [asdict(case) | {"seed": seed} | values for seed, values in enumerate(found)]
                    base = found if mechanism == report.BASE else base
                    medians[case] = report.middle(found, base)
                    print(report.row(case, medians[case]), flush=True)
    settings = {name: value for name, value in vars(arguments).items() if name != "out"}
    result = {
        "simulated": True,
        "settings": settings | {"curve": str(arguments.curve)},
        "length_laws": {name: asdict(LENGTH_LAWS[name].scaled(arguments.scale)) for name in arguments.lengths},
        "curves": curves.as_json(),
        "medians": [asdict(case) | values for case, values in medians.items()],
        "runs": runs,
        "live": [asdict(case) | record for case, record in live.items()],
    }
    (arguments.out / RESULT_FILE).write_text(json.dumps(result), encoding="utf-8")
    report.plot(medians, live, arguments.out / PLOT_FILE)
    print(f"Simulated figures are in {arguments.out / RESULT_FILE}, a picture in {arguments.out / PLOT_FILE}.")


def _simulate_case(
    case: Case, curves: CostCurves, arguments: argparse.Namespace
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """The figures of every seed, and the live samples of the first."""
    law = LENGTH_LAWS[case.lengths].scaled(arguments.scale)
    found = []

    def draw(seed: int) -> Workload:
        return draw_workload(law, case.engines * arguments.samples_per_engine, arguments.members, seed)

    for seed in range(arguments.seeds):
        earlier = [draw(EARLIER_SEED + seed + past) for past in range(arguments.earlier)]
        result = simulate(
            MECHANISMS[case.mechanism],
            draw(seed),
            case.engines,
            curves,
            start=case.start,
            plan_seconds=arguments.plan_seconds,
            earlier=None if arguments.oracle else earlier,
        )
        found.append(report.figures(result))
        if seed == 0:
            live = report.live_record(result)
    return found, live


def _parse(words: list[str] | None) -> argparse.Namespace:
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[8], help="of a device each (default 8)")
    parser.add_argument("--lengths", nargs="+", default=["reasoning"], choices=LENGTH_LAWS, help="default: reasoning")
    parser.add_argument("--starts", nargs="+", default=["even"], choices=STARTS, help="default: even")
    parser.add_argument(
        "--mechanisms", nargs="+", default=list(MECHANISMS), choices=MECHANISMS, help="default: all, static first"
    )
    parser.add_argument("--curve", default="h200-8b", help=f"{', '.join(TARGETS)}, or a JSON file (default h200-8b)")
    parser.add_argument("--samples-per-engine", type=int, default=64, help="default 64")
    parser.add_argument("--members", type=int, default=8, help="samples of one prompt (default 8)")
    parser.add_argument("--slots", type=int, help="samples an engine decodes at once (default: the curve's)")
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths (default 1)")
    parser.add_argument("--seeds", type=int, default=1, help="number of random workloads (default 1)")
    parser.add_argument("--plan-seconds", type=float, default=0.25, help="between two plans (default 0.25)")
    parser.add_argument(
        "--earlier", type=int, default=2, help="rollouts of other prompts that lengths are predicted from (default 2)"
    )
    parser.add_argument("--oracle", action="store_true", help="policies are told the true lengths")
    parser.add_argument("--out", type=Path, required=True, help="directory for the results")
    arguments = parser.parse_args(words)
    for name in ("samples_per_engine", "members", "seeds", "scale", "plan_seconds", "slots"):
        value = getattr(arguments, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UserError(f"--{name.replace('_', '-')} is {value}; it must be above 0.")
    if arguments.earlier < 0:
        raise UserError(f"--earlier is {arguments.earlier}; it must be 0 or more.")
    if not all(1 <= count <= MOST_ENGINES for count in arguments.engines):
        raise UserError(f"--engines must be from 1 to {MOST_ENGINES} each.")
    arguments.mechanisms.sort(key=list(MECHANISMS).index)  # what others are compared to comes first
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {arguments.out} cannot be made ({error.strerror}): choose another place.") from None
    if not os.access(arguments.out, os.W_OK):
        raise UserError(f"--out {arguments.out} cannot be written to: choose another place.")
    return arguments


def _curves(arguments: argparse.Namespace) -> CostCurves:
    target = TARGETS.get(arguments.curve)
    curves = roofline(arguments.curve, target) if target else read_curves(Path(arguments.curve))
    if curves.drafting is None and (asked := [name for name in arguments.mechanisms if MECHANISMS[name].drafts]):
        raise UserError(f"{arguments.curve} has no curve with drafting: leave {', '.join(asked)} out of --mechanisms.")
    return replace(curves, slots=arguments.slots) if arguments.slots else curves


if __name__ == "__main__":
    sys.exit(main())
