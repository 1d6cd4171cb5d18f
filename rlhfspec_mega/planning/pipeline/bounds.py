"""A lower bound of the makespan that no schedule can beat, whatever the order of micro-batches."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from rlhfspec_mega.planning.pipeline.problem import Problem

# Of a task: the seconds before it can start, its own, and the seconds that must follow it.
Job = tuple[float, float, float]


def lower_bound(problem: Problem) -> float:
    """The largest of the devices' bounds; each device is taken as if it alone could compute one task at a time.

    It is at least each bound of RLHFuse (arXiv 2409.13221): a model's own pipeline, a device's work, and a device's
    earliest arrival plus its work plus the shortest tail.
    """
    return max(_one_machine_bound(jobs) for jobs in _jobs(problem))


def _jobs(problem: Problem) -> Iterator[list[Job]]:
    """The jobs of each device."""
    found: list[list[Job]] = [[] for _ in range(problem.devices)]
    for pipeline in problem.pipelines:
        forward, backward = pipeline.forward, pipeline.backward
        before = np.cumsum(forward, axis=0) - forward
        after = np.cumsum(backward, axis=0) - backward
        chain = (forward + backward)[::-1].cumsum(axis=0)[::-1]  # from a stage's forward to its backward, both included
        for stage, device in enumerate(pipeline.devices):
            for batch in range(pipeline.micro_batches):
                f, b = float(forward[stage, batch]), float(backward[stage, batch])
                head, tail, loop = float(before[stage, batch]), float(after[stage, batch]), float(chain[stage, batch])
                found[device].append((head, f, loop - f + tail))
                found[device].append((head + loop - b, b, tail))
    yield from found


def _one_machine_bound(jobs: list[Job]) -> float:
    """Least makespan of jobs with heads and tails on a machine that may interrupt them (Jackson's rule; Carlier 1982).

    At every moment the machine works on the available job with the longest tail.
    """
    jobs = sorted(jobs)
    available: list[tuple[float, float]] = []  # a heap of (-tail, seconds left)
    now, bound, index = 0.0, 0.0, 0
    while index < len(jobs) or available:
        if not available:
            now = max(now, jobs[index][0])
        while index < len(jobs) and jobs[index][0] <= now:
            heapq.heappush(available, (-jobs[index][2], jobs[index][1]))
            index += 1
        tail, left = heapq.heappop(available)
        until = jobs[index][0] if index < len(jobs) else float("inf")
        if now + left <= until:
            now += left
            bound = max(bound, now - tail)
        else:
            heapq.heappush(available, (tail, left - (until - now)))
            now = until
    return bound
