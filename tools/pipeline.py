"""Solve and draw the fused pipeline schedule of two models that train on the same devices, in opposite directions.

    python -m tools.pipeline --p 4,4 --m 8,8 --f 1,1

Model 0 has a stage on each device; model 1 has as many replicas as its stages go into those of model 0, each on
neighbouring devices in reverse order. A backward takes twice as long as a forward, unless --b or --durations say
otherwise. With --run, durations are those of a run's last fused pass, which is drawn below the plan. Serial: both under
1F1B, one after the other. Greedy: a free device takes the next backward, else the next forward, of model 0 first. No
schedule is shorter than the lower bound.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.observe.gantt import Bar, plot_schedules
from rlhfspec_mega.planning.pipeline.baselines import serial
from rlhfspec_mega.planning.pipeline.greedy import greedy
from rlhfspec_mega.planning.pipeline.notation import labels, read_durations
from rlhfspec_mega.planning.pipeline.problem import Doubles, Problem, opposed_pipelines
from rlhfspec_mega.planning.pipeline.schedule import Schedule
from rlhfspec_mega.planning.pipeline.solver import Solution, solve
from tools.command import exit_status
from tools.pipeline_run import executed_pass

Number = TypeVar("Number", int, float)
MOST_STAGES, MOST_MICRO_BATCHES = 256, 1024
SMALLEST, LARGEST = 1e-9, 1e9  # seconds and bytes: sums of many stay numbers
GIVEN = ("p", "m", "f", "b", "durations", "activation", "memory")  # options that --run replaces


class _Parser(argparse.ArgumentParser):
    """Raises UserError with one sentence instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[:1].upper()}{message[1:]}: see python -m tools.pipeline --help.")


def main(argv: Sequence[str] | None = None) -> int:
    return exit_status(lambda: run(_parse(argv)))


def run(arguments: argparse.Namespace) -> None:
    """Solve, print, draw."""
    problem, ran = executed_pass(arguments.run) if arguments.run else (problem_of(arguments), [])
    solution = solve(problem, seconds=arguments.seconds)
    found = figures(problem, solution)
    if arguments.out is not None:
        title = "makespan {makespan:.4g}, lower bound {lower_bound:.4g}, serial {serial:.4g}".format_map(found)
        charts = [(f"planned: {title}", bars(problem, solution.schedule))]
        if ran:
            charts.append((f"ran: {max(bar.end for bar in ran):.4g}", ran))
        plot_schedules(arguments.out, charts)
    if arguments.json:
        print(json.dumps(found))
        return
    for device, tasks in enumerate(found["schedule"]):
        print(f"device {device}: {' '.join(tasks)}")
    for name in ("makespan", "lower_bound", "serial", "greedy", "peak_memory", "serial_peak_memory", "seconds"):
        value = found[name]
        print(f"{name.replace('_', ' '):20} {'memory runs out' if value is None else format(value, '.6g')}")
    if arguments.out is not None:
        print(f"Drawn in {arguments.out}.")


def figures(problem: Problem, solution: Solution) -> dict[str, Any]:
    """What --json prints; `greedy` is null if that rule runs out of memory."""
    one_by_one, by_rule = serial(problem), greedy(problem)
    return {
        "makespan": solution.schedule.makespan,
        "lower_bound": solution.bound,
        "serial": sum(one.makespan for one in one_by_one),
        "greedy": by_rule.makespan if by_rule is not None else None,
        "peak_memory": solution.schedule.peak_memory,
        "serial_peak_memory": max(one.peak_memory for one in one_by_one),
        "seconds": solution.seconds,
        "schedule": labels(problem, solution.schedule),
    }


def bars(problem: Problem, schedule: Schedule) -> list[Bar]:
    """The schedule as bars of a chart."""
    return [
        Bar(
            device,
            timed.start,
            timed.end,
            problem.pipelines[timed.task.pipeline].model,
            timed.task.backward,
            timed.task.micro_batch,
        )
        for device, tasks in enumerate(schedule.tasks)
        for timed in tasks
    ]


def problem_of(arguments: argparse.Namespace) -> Problem:
    """The problem of a command line. Raises UserError."""
    if arguments.p is None:
        raise UserError("--p is needed, such as --p 4,4; or --run, with the directory of a run.")
    stages, models = arguments.p, range(len(arguments.p))
    if len(stages) > 2:
        raise UserError(f"--p={','.join(map(str, stages))} names {len(stages)} models: one or two are possible.")
    for model in models:
        if stages[0] % stages[model]:
            raise UserError(f"--p: {stages[model]} stages of model {model} do not divide the {stages[0]} of model 0.")
    for name in ("m", "f", "b", "activation"):
        values = getattr(arguments, name)
        if values is not None and len(values) != len(stages):
            raise UserError(f"--{name} has {len(values)} numbers, and --p {len(stages)}: one for each model.")
    if arguments.durations is not None:
        if arguments.f is not None or arguments.b is not None:
            raise UserError("--durations replaces --f and --b: leave those out.")
        forward, backward = read_durations(arguments.durations, stages, arguments.m)
    else:
        if arguments.m is None or arguments.f is None:
            raise UserError("Without --durations, --m and --f are needed, such as --m 8,8 --f 1,1.")
        wide = [np.ones((stages[0] // stages[model], stages[model], arguments.m[model])) for model in models]
        forward = [arguments.f[model] * wide[model] for model in models]
        backward = [one * 2 if arguments.b is None else arguments.b[k] * wide[k] for k, one in enumerate(forward)]
    sizes = arguments.activation or [1.0] * len(stages)
    activation: list[Doubles] = [sizes[model] * np.ones_like(forward[model]) for model in models]
    return opposed_pipelines(stages, forward, backward, activation, arguments.memory or float("inf"))


def _several(kind: Callable[[str], Number], least: float, most: float) -> Callable[[str], list[Number]]:
    def read(text: str) -> list[Number]:
        try:
            found = [kind(part) for part in text.split(",")]
        except ValueError:
            found = []
        if not found or not all(least <= one <= most for one in found):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not one number from {least:g} to {most:g} for each model, such as 4,4"
            )
        return found

    return read


def _positive(text: str) -> float:
    found = _several(float, SMALLEST, LARGEST)(text)
    if len(found) > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not one number")
    return found[0]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    real = _several(float, SMALLEST, LARGEST)
    parser.add_argument(
        "--p", type=_several(int, 1, MOST_STAGES), metavar="P0,P1", help="pipeline stages of each model"
    )
    parser.add_argument(
        "--m",
        type=_several(int, 1, MOST_MICRO_BATCHES),
        metavar="M0,M1",
        help="micro-batches of each model; of the second, a replica's",
    )
    parser.add_argument("--f", type=real, metavar="F0,F1", help="seconds of a forward on one stage")
    parser.add_argument("--b", type=real, metavar="B0,B1", help="seconds of a backward; default: twice a forward")
    parser.add_argument("--durations", type=Path, metavar="FILE", help="JSON with unequal durations; see docs/tools.md")
    parser.add_argument("--run", type=Path, metavar="DIR", help="a run with fused updates, instead of all of the above")
    parser.add_argument(
        "--activation", type=real, metavar="A0,A1", help="bytes of a micro-batch on a stage; default: 1"
    )
    parser.add_argument("--memory", type=_positive, help="most bytes of activations on a device")
    parser.add_argument("--seconds", type=_positive, default=5.0, help="how long to search (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--out", type=Path, metavar="FILE.png", help="draw a chart; default: pipeline.png, none with --json"
    )
    arguments = parser.parse_args(argv)
    if arguments.out is None and not arguments.json:
        arguments.out = Path("pipeline.png")
    if arguments.out is not None and (arguments.out.suffix != ".png" or arguments.out.is_dir()):
        raise UserError(f"--out {arguments.out} must be the name of a file that ends in .png.")
    for name in GIVEN if arguments.run else ():
        if getattr(arguments, name) is not None:
            raise UserError(f"--run takes the place of --{name}: leave one of them out.")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
