"""Simulate rollouts on any number of engines, with and without each mechanism: the real planning code, no model.

    python -m tools.simulate --engines 8 64 256 --lengths chat reasoning --curve h200-8b --seeds 3 --out DIR

Writes DIR/simulated.json (all results, and the cost curves with their origin) and DIR/simulated.png. Cost curves are a
preset computed from a roofline, or a JSON file that rlhfspec_mega.simulate.calibrate has made from a real run. Ratios
are relative to the mechanism `static`, and to a lower bound that no rollout can stay below. --starts says where samples
begin. With `static`, all are with their engines from the beginning; otherwise those for which their engine has no slot
wait in one queue until any engine has one: choose --slots below --samples-per-engine to make samples wait.
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
from rlhfspec_mega.simulate.lower_bound import lower_bound
from rlhfspec_mega.simulate.mechanisms import MECHANISMS, simulate
from rlhfspec_mega.simulate.report import Case
from rlhfspec_mega.simulate.roofline import CURVES, roofline
from rlhfspec_mega.simulate.workload import LENGTH_DISTRIBUTIONS, STARTS, Workload, draw_workload

MOST_ENGINES = 1024
RESULT_FILE, PLOT_FILE = "simulated.json", "simulated.png"
EARLIER_SEED = 10**6  # first seed of earlier rollouts, so that they differ from the simulated ones


class _Parser(argparse.ArgumentParser):
    """Raises UserError with one sentence instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[:1].upper()}{message[1:]}: see python -m tools.simulate --help.")


def main(argv: list[str] | None = None) -> int:
    try:
        arguments = _parse(argv)
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
                    medians[case] = report.medians_over_seeds(found, base)
                    print(report.row(case, medians[case]), flush=True)
    settings = {name: value for name, value in vars(arguments).items() if name != "out"}
    result = {
        "simulated": True,
        "settings": settings | {"curve": str(arguments.curve)},
        "length_laws": {name: asdict(LENGTH_DISTRIBUTIONS[name].scaled(arguments.scale)) for name in arguments.lengths},
        "curves": curves.as_json(),
        "medians": [asdict(case) | values for case, values in medians.items()],
        "runs": runs,
        "live": [asdict(case) | record for case, record in live.items()],
    }
    (arguments.out / RESULT_FILE).write_text(json.dumps(result), encoding="utf-8")
    report.plot(medians, live, arguments.out / PLOT_FILE)
    print(f"Results of the simulation are in {arguments.out / RESULT_FILE}, a plot is in {arguments.out / PLOT_FILE}.")


def _simulate_case(
    case: Case, curves: CostCurves, arguments: argparse.Namespace
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """The results of every seed, and the live samples over time of the first seed."""
    distribution = LENGTH_DISTRIBUTIONS[case.lengths].scaled(arguments.scale)
    found = []

    def draw(seed: int) -> Workload:
        return draw_workload(distribution, case.engines * arguments.samples_per_engine, arguments.members, seed)

    mechanism = MECHANISMS[case.mechanism]
    curve = curves.drafting if mechanism.drafts and curves.drafting else curves.plain
    for seed in range(arguments.seeds):
        workload = draw(seed)
        earlier = [draw(EARLIER_SEED + seed + past) for past in range(arguments.earlier)]
        result = simulate(
            mechanism,
            workload,
            case.engines,
            curves,
            start=case.start,
            plan_seconds=arguments.plan_seconds,
            earlier=None if arguments.oracle else earlier,
        )
        found.append(report.figures(result, lower_bound(workload, case.engines, curves, curve)))
        if seed == 0:
            live = report.live_record(result)
    return found, live


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[8], help="engines, one per device (default 8)")
    parser.add_argument(
        "--lengths", nargs="+", default=["reasoning"], choices=LENGTH_DISTRIBUTIONS, help="default: reasoning"
    )
    parser.add_argument("--starts", nargs="+", default=["even"], choices=STARTS, help="default: even")
    parser.add_argument("--mechanisms", nargs="+", default=list(MECHANISMS), choices=MECHANISMS, help="default: all")
    parser.add_argument("--curve", default="h200-8b", help=f"{', '.join(CURVES)}, or a JSON file (default h200-8b)")
    parser.add_argument("--samples-per-engine", type=int, default=64, help="default 64")
    parser.add_argument("--members", type=int, default=8, help="samples of one prompt (default 8)")
    parser.add_argument("--slots", type=int, help="most samples an engine decodes at once (default: the curve's)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all lengths (default 1)")
    parser.add_argument("--seeds", type=int, default=1, help="number of random workloads (default 1)")
    parser.add_argument("--plan-seconds", type=float, default=0.25, help="simulated time between plans (default 0.25)")
    parser.add_argument(
        "--earlier", type=int, default=2, help="rollouts of other prompts from which lengths are predicted (default 2)"
    )
    parser.add_argument("--oracle", action="store_true", help="policies know the true lengths")
    parser.add_argument("--out", type=Path, required=True, help="directory for the results")
    arguments = parser.parse_args(argv)
    for name in ("samples_per_engine", "members", "seeds", "scale", "plan_seconds", "slots"):
        value = getattr(arguments, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UserError(f"--{name.replace('_', '-')} is {value}: it must be above 0.")
    if arguments.earlier < 0:
        raise UserError(f"--earlier is {arguments.earlier}: it must be 0 or more.")
    if not all(1 <= count <= MOST_ENGINES for count in arguments.engines):
        raise UserError(f"--engines has a number outside 1 to {MOST_ENGINES}: choose others.")
    arguments.mechanisms.sort(key=list(MECHANISMS).index)  # `static`, which others are compared to, comes first
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {arguments.out} cannot be created ({error.strerror}): choose another place.") from None
    if not os.access(arguments.out, os.W_OK):
        raise UserError(f"--out {arguments.out} is not writable: choose another place.")
    return arguments


def _curves(arguments: argparse.Namespace) -> CostCurves:
    curves = roofline(arguments.curve) if arguments.curve in CURVES else read_curves(Path(arguments.curve))
    if curves.drafting is None and (asked := [name for name in arguments.mechanisms if MECHANISMS[name].drafts]):
        raise UserError(f"{arguments.curve} has no curve with drafting: leave {', '.join(asked)} out of --mechanisms.")
    return replace(curves, slots=arguments.slots) if arguments.slots else curves


if __name__ == "__main__":
    sys.exit(main())
