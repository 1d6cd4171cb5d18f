"""Pipeline problems and valid schedules at random, and a checker that shares no code with the solver."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhfspec_mega.planning.pipeline.problem import Problem, opposed_pipelines
from rlhfspec_mega.planning.pipeline.schedule import Task


def equal_problem(
    stages: Sequence[int], micro_batches: Sequence[int], forward: Sequence[float], **more: Any
) -> Problem:
    """Backwards take twice as long as forwards; a micro-batch keeps one byte."""
    times = [
        np.full((stages[0] // stages[model], stages[model], micro_batches[model]), float(forward[model]))
        for model in range(len(stages))
    ]
    return opposed_pipelines(stages, times, [2 * one for one in times], [np.ones_like(one) for one in times], **more)


def unequal_problem(
    stages: Sequence[int], micro_batches: Sequence[int], forward: Sequence[float], sigma: float, seed: int
) -> Problem:
    """Lognormal lengths of micro-batches, the same on all stages; a micro-batch keeps its length in bytes."""
    draw = np.random.default_rng(seed)
    lengths = [
        np.repeat(draw.lognormal(0, sigma, (stages[0] // size, 1, count)), size, axis=1)
        for size, count in zip(stages, micro_batches, strict=True)
    ]
    times = [one * factor for one, factor in zip(lengths, forward, strict=True)]
    return opposed_pipelines(stages, times, [2 * one for one in times], lengths)


def random_orders(problem: Problem, seed: int) -> list[list[Task]]:
    """A valid schedule: tasks that are ready, one after the other at random; micro-batches in their order."""
    draw = random.Random(seed)
    done: set[tuple[int, int, int, bool]] = set()
    orders: list[list[Task]] = [[] for _ in range(problem.devices)]
    left = [
        Task(line, stage, batch, backward)
        for line, one in enumerate(problem.pipelines)
        for stage in range(one.stages)
        for batch in range(one.micro_batches)
        for backward in (False, True)
    ]
    while left:
        ready = [task for task in left if all(one in done for one in needs(problem, task))]
        task = draw.choice(ready)
        left.remove(task)
        done.add(tuple(task))
        orders[problem.pipelines[task.pipeline].devices[task.stage]].append(task)
    return orders


def needs(problem: Problem, task: Task) -> list[tuple[int, int, int, bool]]:
    """What must have ended before a task: another stage's, and the micro-batch before it on this one."""
    line, stage, batch, backward = task
    last = problem.pipelines[line].stages - 1
    found = [(line, stage, batch - 1, backward)] if batch else []
    if not backward:
        return found + ([(line, stage - 1, batch, False)] if stage else [])
    return [*found, (line, stage + 1, batch, True) if stage < last else (line, stage, batch, False)]


def checked_makespan(problem: Problem, labels: Sequence[Sequence[str]]) -> tuple[float, float]:
    """Makespan and peak of live bytes of a schedule as tools.pipeline prints it; fails if it is not valid.

    Written apart from the solver: it repeats over all devices until nothing moves.
    """
    hosts = [{problem.pipelines[line].model: (line, stage) for line, stage in found} for found in problem.hosted]
    queues = [list(tasks) for tasks in labels]
    assert sum(map(len, queues)) == problem.tasks
    ends: dict[tuple[int, int, int, str], float] = {}
    clock, live, peak = [0.0] * len(queues), [0.0] * len(queues), 0.0
    moved = True
    while moved:
        moved = False
        for device, queue in enumerate(queues):
            while queue:
                model, way, batch = int(queue[0][0]), queue[0][1], int(queue[0][2:])
                line, stage = hosts[device][model]
                one = problem.pipelines[line]
                if way == "F":
                    before = (line, stage - 1, batch, "F") if stage else None
                else:
                    before = (line, stage + 1, batch, "B") if stage < one.stages - 1 else (line, stage, batch, "F")
                    assert (line, stage, batch, "F") in ends
                if before is not None and before not in ends:
                    break
                assert (line, stage, batch, way) not in ends
                took = (one.forward if way == "F" else one.backward)[stage, batch]
                clock[device] = max(clock[device], ends[before] if before else 0.0) + took
                ends[line, stage, batch, way] = clock[device]
                live[device] += one.activation[stage, batch] * (1 if way == "F" else -1)
                peak = max(peak, live[device])
                queue.pop(0)
                moved = True
    assert not any(queues), "devices wait for each other"
    return max(clock), peak
