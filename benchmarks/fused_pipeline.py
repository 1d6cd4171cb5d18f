"""Executed fused schedules against one model after the other: python -m benchmarks.fused_pipeline [--seeds 21].

Actor and critic on four pipeline stages each, in four processes, by the project's executor over gloo. Two cores cannot
show four devices that compute at the same time, so the times of tasks are imposed: a rank that has computed a task
waits until the task's time is over. What is measured is the executor: its transfers, its waits, its overhead.

Serial is 1F1B, one model after the other, each in the best order of its micro-batches that was found. Blind is fused,
planned as if all micro-batches were alike. Lengths are drawn anew for each seed, lognormal, their mean 1: the same for
both models, as where both train on the same micro-batches, or of each model its own, as where they are packed
differently. Prints a table; the figures are saved as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paired import ratio_interval
from rlhfspec_mega.cluster.interface import WorkerGroup, WorkerSpec
from rlhfspec_mega.cluster.local import LocalCluster
from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.config.model_shape import model_shape
from rlhfspec_mega.megatron.description import Learning, ParallelSizes, describe
from rlhfspec_mega.megatron.rendezvous import Rendezvous
from rlhfspec_mega.planning.pipeline.baselines import one_after_the_other
from rlhfspec_mega.planning.pipeline.bounds import lower_bound
from rlhfspec_mega.planning.pipeline.problem import Problem, opposed_pipelines
from rlhfspec_mega.planning.pipeline.rank_task import RankTask
from rlhfspec_mega.planning.pipeline.schedule import Orders, timed
from rlhfspec_mega.planning.pipeline.solver import solve
from rlhfspec_mega.rl.experience import Experience
from rlhfspec_mega.rl.microbatch import Objective, Shard
from rlhfspec_mega.rl.objectives import supervised_objective
from rlhfspec_mega.workers.megatron import MegatronWorker

STAGES = 4
FORWARD = 0.03  # seconds of the forward of a micro-batch of length 1
NAMES = ("actor", "critic")
# Micro-batches of each model, sigma of their lognormal lengths, whether both models have the same ones.
CASES = [(4, 0.0, True), (8, 0.0, True), (8, 0.3, True), (8, 0.77, True), (8, 0.3, False), (8, 0.77, False)]
LIMITS = {"call_timeout": 300.0, "start_timeout": 120.0, "heartbeat_timeout": 60.0, "max_restarts": 0}
DEMO = load_config([])
# Of each rank, its tasks and their seconds.
Timetable = list[tuple[list[RankTask], list[float]]]


class PacedWorker(MegatronWorker):
    """Computes tasks, and waits until the time that they are said to take is over."""

    def paced(
        self, tasks: Sequence[RankTask], seconds: Sequence[float], shards: Mapping[str, Shard]
    ) -> tuple[float, float]:
        """Start of the first task and end of the last one, in seconds since the epoch."""
        ends = dict(zip(tasks, seconds, strict=True))

        def wait(task: RankTask, began: float) -> None:
            time.sleep(max(began + ends[task] - time.perf_counter(), 0.0))

        names = {task.model for task in tasks}
        batches = {name: shards[name].batches() for name in NAMES if name in names}
        objectives = {name: Objective(supervised_objective, []) for name in batches}
        _, times = self._fused.accumulate(batches, objectives, tasks, wait)
        return times[0].start, times[-1].start + times[-1].seconds


@contextmanager
def workers(directory: Path) -> Iterator[WorkerGroup]:
    shape = model_shape(DEMO.model)
    learning, sizes = Learning(DEMO.actor.optimizer, 1000), ParallelSizes(pipeline=STAGES)
    models = [
        describe(name, shape, DEMO.actor, replace(sizes, opposed_to=opposed), temperature=1.0, learning=learning)
        for name, opposed in zip(NAMES, (0, STAGES), strict=True)
    ]
    cluster = LocalCluster(directory / "logs", threads=1, use_gpus=False, **LIMITS)
    try:
        arguments = {"models": models, "device": "cpu", "seed": 0}
        meet = f"file://{directory / 'meet'}"
        specs = [
            WorkerSpec(
                "benchmarks.fused_pipeline.PacedWorker",
                arguments | {"rendezvous": Rendezvous(meet, rank, STAGES, LIMITS["call_timeout"])},
                devices=(rank,),
            )
            for rank in range(STAGES)
        ]
        group = cluster.launch("actor", specs)
        cluster.wait_started()
        yield group
    finally:
        cluster.close()


def lengths_of(count: int, sigma: float, same: bool, seed: int) -> list[np.ndarray]:
    """Of both models, the relative lengths of their micro-batches; the mean is 1."""
    drawn = np.random.default_rng(seed).lognormal(0, sigma, (2, count))
    drawn /= drawn.mean(axis=1, keepdims=True)
    return [drawn[0], drawn[0] if same else drawn[1]]


def problem_of(lengths: Sequence[np.ndarray]) -> Problem:
    times = [np.tile(one * FORWARD, (1, STAGES, 1)) for one in lengths]
    return opposed_pipelines([STAGES, STAGES], times, [2 * one for one in times], [np.ones_like(one) for one in times])


def timetable(problem: Problem, orders: Orders) -> Timetable:
    """The true seconds of the tasks of an order."""
    found: Timetable = []
    for order in orders:
        tasks = [RankTask(NAMES[problem.pipelines[one.pipeline].model], one.micro_batch, one.backward) for one in order]
        pipelines = [problem.pipelines[one.pipeline] for one in order]
        seconds = [
            float((one.backward if task.backward else one.forward)[task.stage, task.micro_batch])
            for one, task in zip(pipelines, order, strict=True)
        ]
        found.append((tasks, seconds))
    return found


def executed(group: WorkerGroup, shards: Mapping[str, Shard], tables: Sequence[Timetable]) -> float:
    """Seconds of passes that follow each other; each lasts from its first start to its last end on any rank."""
    total = 0.0
    for table in tables:
        answers = group.scatter("paced", [(tasks, seconds, shards) for tasks, seconds in table], "benchmark")
        total += max(end for _, end in answers) - min(start for start, _ in answers)
    return total


def variants_of(lengths: Sequence[np.ndarray]) -> tuple[dict[str, list[Timetable]], dict[str, float]]:
    """Passes of each way to train both models, and their predicted seconds."""
    true = problem_of(lengths)
    blind = solve(problem_of([np.ones_like(one) for one in lengths])).schedule.orders
    alone = [true.of_model(model) for model in (0, 1)]
    one_by_one = [_best_alone(part) for part in alone]
    passes = {
        "serial": [_of_model(part, one, k) for k, (part, one) in enumerate(zip(alone, one_by_one, strict=True))],
        "blind": [timetable(true, blind)],
        "fused": [timetable(true, solve(true).schedule.orders)],
    }
    predicted = {
        "serial": sum(timed(part, one).makespan for part, one in zip(alone, one_by_one, strict=True)),
        "blind": timed(true, blind).makespan,
        "fused": solve(true).schedule.makespan,
        "bound": lower_bound(true),
    }
    return passes, predicted


def _best_alone(problem: Problem) -> Orders:
    """The best order found of a model alone."""
    candidates: list[Orders] = [solve(problem).schedule.orders, one_after_the_other(problem)]
    makespans = [timed(problem, one).makespan for one in candidates]
    return candidates[makespans.index(min(makespans))]


def _of_model(problem: Problem, orders: Orders, model: int) -> Timetable:
    return [
        ([task._replace(model=NAMES[model]) for task in tasks], seconds)
        for tasks, seconds in timetable(problem, orders)
    ]


def measured(group: WorkerGroup, case: tuple[int, float, bool], seeds: int) -> dict[str, Any]:
    """Seconds of all variants for each seed, predicted and executed, in turns."""
    count, sigma, same = case
    samples = Experience.of([[1, 2, 3]] * count, [[4, 5, 6]] * count)
    shards = {name: Shard.cut(samples, [[one] for one in range(count)]) for name in NAMES}
    predicted: dict[str, list[float]] = {}
    times: dict[str, list[float]] = {}
    for seed in range(seeds):
        passes, seconds = variants_of(lengths_of(count, sigma, same, seed))
        names = list(passes)
        for name in names[seed % 3 :] + names[: seed % 3]:
            times.setdefault(name, []).append(executed(group, shards, passes[name]))
        for name, one in seconds.items():
            predicted.setdefault(name, []).append(one)
    return {"micro_batches": count, "sigma": sigma, "same_lengths": same, "predicted": predicted, "executed": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=21)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/fused_pipeline_cpu.json"))
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("Task times are imposed. Ratios of executed seconds, medians of seeds with their intervals.")
    print("M  sigma  lengths   fused: executed / predicted  serial / fused        blind / fused")
    with tempfile.TemporaryDirectory(prefix="benchmark.") as directory, workers(Path(directory)) as group:
        for case in CASES:
            row = measured(group, case, arguments.seeds)
            times = row["executed"]
            over = statistics.median(np.divide(times["fused"], row["predicted"]["fused"]))
            gain, of_blind = (ratio_interval(times[name], times["fused"]) for name in ("serial", "blind"))
            rows.append(row | {"serial_over_fused": vars(gain), "blind_over_fused": vars(of_blind)})
            of_whom = "same" if case[2] else "own"
            print(f"{case[0]:<2} {case[1]:<5}  {of_whom:8}  {over:<27.3f}  {gain!s:21} {of_blind}", flush=True)
    figures = {"stages": STAGES, "forward": FORWARD, "seeds": arguments.seeds, "imposed": True, "rows": rows}
    arguments.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
