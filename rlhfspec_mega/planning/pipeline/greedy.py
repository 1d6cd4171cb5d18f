"""A greedy schedule, for comparison; RLHFuse (arXiv 2409.13221) follows another rule, with other figures."""

from __future__ import annotations

import numpy as np

from rlhfspec_mega.planning.pipeline.dispatch import DueDates, as_arrays, dispatch, schedule_of
from rlhfspec_mega.planning.pipeline.problem import Problem
from rlhfspec_mega.planning.pipeline.schedule import Schedule


def greedy(problem: Problem) -> Schedule | None:
    """A free device computes the next backward if one is ready, else the next forward; the first model goes first.

    None if memory runs out on the way.
    """
    arrays = as_arrays(problem)
    lines, most = len(problem.pipelines), arrays.activation.shape[1]
    zeros = np.zeros(lines)
    later = [one.model for one in problem.pipelines for _ in one.devices]
    # Larger than all other parts of a due date.
    by_node = 10 * arrays.work.sum() * np.stack([2.0 + np.array(later), np.array(later)], axis=1).ravel()
    orders = np.tile(np.arange(most), (lines, 1))
    starts = np.zeros(arrays.durations.shape)
    wanted = DueDates(orders, zeros, zeros, zeros, by_node, np.zeros((2 * lines, most)))
    no_limit = np.full(len(arrays.counts), most)
    makespan, _, _ = dispatch(arrays, wanted, no_limit, problem.capacities, 0.0, np.inf, starts)
    return schedule_of(problem, orders, starts) if makespan < np.inf else None
