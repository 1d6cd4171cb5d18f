"""A greedy schedule, for comparison; RLHFuse (arXiv 2409.13221) follows another rule, with other figures."""

from __future__ import annotations

import numpy as np

from rlhfspec_mega.planning.pipeline.dispatch import as_arrays, dispatch, placed, schedule_of
from rlhfspec_mega.planning.pipeline.problem import Problem
from rlhfspec_mega.planning.pipeline.schedule import Schedule


def greedy(problem: Problem) -> Schedule | None:
    """A free device computes the next backward if one is ready, else the next forward; the first model goes first.

    None if memory runs out on the way.
    """
    arrays = as_arrays(problem)
    lines, most = len(problem.pipelines), arrays.activation.shape[1]
    later = np.array([one.model for one in problem.pipelines for _ in one.devices])
    orders, starts = np.tile(np.arange(most), (lines, 1)), np.zeros(arrays.durations.shape)
    due = np.tile(np.stack([2.0 + later, later], axis=1).reshape(-1, 1), most)
    seconds, size = placed(arrays, orders)
    limits = (np.full(len(arrays.counts), most), problem.capacities)
    makespan, _, _ = dispatch(arrays, seconds, size, due, arrays.around[1], *limits, 0.0, np.inf, starts)
    return schedule_of(problem, orders, starts) if makespan < np.inf else None
