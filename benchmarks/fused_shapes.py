"""Predicted gains of fused schedules for large models: python -m benchmarks.fused_shapes [--seconds 2].

Llama shapes as actor and critic (RLHFuse, arXiv 2409.13221, compares the same ones). Nothing is executed: a stage's
forward takes as long as its layers' matrix products, a backward twice as long, and micro-batches are alike. The unit
is the forward of a stage of the first model. Where layers do not divide by the stages, more layers are taken, as said.

Prints a table; the figures are saved as JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from rlhfspec_mega.planning.pipeline.baselines import serial
from rlhfspec_mega.planning.pipeline.greedy import greedy
from rlhfspec_mega.planning.pipeline.problem import opposed_pipelines
from rlhfspec_mega.planning.pipeline.solver import solve

LAYERS = {"13B": (40, 5120), "33B": (60, 6656), "65B": (80, 8192)}  # number, hidden size
PAIRS = [("33B", "13B"), ("65B", "13B"), ("65B", "33B"), ("33B", "33B")]  # the larger model has the more stages
STAGES = [(8, 4), (8, 8), (16, 8), (16, 16), (32, 16), (32, 32)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="of search for each row")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/fused_shapes_predicted.json"))
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("Predicted, not executed. M: micro-batches of the first model, twice its stages.")
    print("models   layers  stages  M   bound   ours/bound  greedy/ours  serial/ours  peak: ours  serial")
    for pair in PAIRS:
        for stages in STAGES:
            layers = [-(-LAYERS[name][0] // size) * size for name, size in zip(pair, stages, strict=True)]
            work = [count / size * LAYERS[name][1] ** 2 for count, size, name in zip(layers, stages, pair, strict=True)]
            counts = (2 * stages[0], 2 * stages[1])  # as many samples in both models' micro-batches
            replicas = [stages[0] // size for size in stages]
            shapes = [(many, size, count) for many, size, count in zip(replicas, stages, counts, strict=True)]
            times = [np.full(shape, one / work[0]) for shape, one in zip(shapes, work, strict=True)]
            problem = opposed_pipelines(stages, times, [2 * one for one in times], [np.ones(shape) for shape in shapes])
            found, by_rule, parts = solve(problem, seconds=arguments.seconds), greedy(problem), serial(problem)
            assert by_rule is not None
            ours, one_by_one = found.schedule.makespan, sum(one.makespan for one in parts)
            row = {"models": pair, "layers": layers, "stages": stages, "micro_batches": counts, "bound": found.bound}
            row |= {"ours": ours, "greedy": by_rule.makespan, "serial": one_by_one}
            row |= {"peak": found.schedule.peak_memory, "serial_peak": max(one.peak_memory for one in parts)}
            rows.append(row)
            print(
                f"{'/'.join(pair):8} {'/'.join(map(str, layers)):7} {'/'.join(map(str, stages)):6} {counts[0]:3}  "
                f"{found.bound:6.1f}  {ours / found.bound:10.3f}  {by_rule.makespan / ours:11.3f}  "
                f"{one_by_one / ours:11.3f}  {row['peak']:10.0f}  {row['serial_peak']:6.0f}",
                flush=True,
            )
    arguments.out.write_text(json.dumps({"predicted": True, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
