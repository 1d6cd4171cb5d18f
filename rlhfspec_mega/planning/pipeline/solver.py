"""Finds a fused schedule of short makespan and, among equals, of little activation memory.

Due dates are drawn at random (due_dates.py), and the schedule that each of them gives is made shorter by justification
(justification.py). The best are improved step by step: disturbed a little, and justified again. RLHFuse (arXiv
2409.13221) anneals the orders of tasks themselves, on hundreds of cores.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from rlhfspec_mega.planning.pipeline.baselines import in_turn
from rlhfspec_mega.planning.pipeline.bounds import lower_bound
from rlhfspec_mega.planning.pipeline.dispatch import Ints, as_arrays, dispatch, placed, schedule_of
from rlhfspec_mega.planning.pipeline.due_dates import DueDates, Lots, due_dates
from rlhfspec_mega.planning.pipeline.greedy import greedy
from rlhfspec_mega.planning.pipeline.justification import justified
from rlhfspec_mega.planning.pipeline.problem import Doubles, Problem
from rlhfspec_mega.planning.pipeline.schedule import Schedule

QUICK_TASKS = 500_000  # tasks simulated for a plan of one update: 60 to 110 ms of one core
_ELITE = 3  # schedules that are improved side by side
_DRAWN, _FOR_MEMORY = 0.5, 0.1  # shares of the effort for due dates at random, and for less memory
_PATIENT = 0.15  # share of schedules in which devices may wait: the shortest of all may need that
_WORTH = 1.2  # a schedule that is so much longer than the best ones is not justified
_OVERHEAD = 200  # what preparing a simulation costs, in tasks
_EQUAL = 1 + 1e-9


@dataclass(frozen=True)
class Solution:
    """A schedule, and how good it can be at best.

    Attributes:
        bound: no schedule has a shorter makespan.
        seconds: what the search took.
    """

    schedule: Schedule
    bound: float
    seconds: float


def solve(problem: Problem, *, tasks: int = QUICK_TASKS, seconds: float | None = None, seed: int = 0) -> Solution:
    """The best schedule found; it is never worse than the models one after the other, or `greedy`.

    Args:
        tasks: effort, in tasks of simulated schedules: the result depends on it and not on the clock.
        seconds: instead of `tasks`, the time to search.

    Raises UserError if a single micro-batch exceeds the memory.
    """
    began = time.perf_counter()
    bound, known = lower_bound(problem), in_turn(problem)
    quick = greedy(problem)
    if quick is not None and quick.makespan < known.makespan:
        known = quick
    search = _Search(problem, known, seed)

    def left() -> float:
        """Share of the effort that is left."""
        return 1 - ((time.perf_counter() - began) / seconds if seconds is not None else search.simulated / tasks)

    def reached() -> bool:
        return search.best <= bound * _EQUAL

    while left() > 1 - _DRAWN and not reached():
        search.draw()
    while left() > _FOR_MEMORY and not reached():
        search.improve()
    end = max(left() - _FOR_MEMORY, 0.0) if seconds is None else 0.0
    while left() > end and search.pool:
        search.save_memory()
    found = search.schedule(problem)
    worse = found is None or (known.makespan, known.peak_memory) < (found.makespan / _EQUAL, found.peak_memory)
    return Solution(known if worse or found is None else found, bound, time.perf_counter() - began)


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A schedule.

    Attributes:
        peak: of activation bytes on any device.
        orders: [L, M] of micro-batches.
        starts: [2V, M] seconds by place.
        most_live: [V] its limits of live micro-batches.
    """

    makespan: float
    peak: float
    orders: Ints
    starts: Doubles
    most_live: Ints


class _Search:
    """Schedules that were found.

    Attributes:
        pool: the best ones, the shortest first.
        simulated: tasks of all schedules that were made.
    """

    def __init__(self, problem: Problem, known: Schedule, seed: int) -> None:
        self._arrays, self._known, self._memory = as_arrays(problem), known.makespan, problem.capacities
        self._random = np.random.default_rng(seed)
        self._lots = Lots(problem, self._arrays, seed)
        self._task = problem.mean_task
        self._uneven = [line for line, one in enumerate(problem.pipelines) if np.ptp(one.lengths) > 0]
        self._counts = [one.micro_batches for one in problem.pipelines]
        self._still = np.zeros(self._arrays.durations.shape)
        self.pool: list[_Candidate] = []
        self.simulated = 0

    @property
    def best(self) -> float:
        """Makespan of the best schedule."""
        return min(self.pool[0].makespan, self._known) if self.pool else self._known

    def draw(self) -> None:
        """Try due dates at random."""
        dates, most_live = self._lots.draw(), self._lots.draw_most_live()
        limit = self.pool[-1].makespan if len(self.pool) == _ELITE else np.inf
        found = self._dispatched(dates, most_live, limit * _WORTH)
        if found is None:
            return
        shorter = self._justified(found, self._still, self._memory, min(limit, found.makespan))
        found = found if shorter is None else shorter
        if found.makespan < limit:
            self.pool = sorted([*self.pool, found], key=lambda one: one.makespan)[:_ELITE]

    def improve(self) -> None:
        """Disturb one of the best schedules, and keep the result if it is no worse."""
        if not self.pool:
            self.draw()
            return
        # The first ones more often than the last of a full pool, which is there in case that they are dead ends.
        chosen = int(self._random.integers(len(self.pool) + 2)) % len(self.pool)
        before = self.pool[chosen]
        if self._uneven and self._random.random() < 0.2:
            before = replace(before, orders=self._reordered(before.orders))
            self._take(chosen, self._justified(before, self._still, self._memory, before.makespan * _EQUAL))
        else:
            self._take(chosen, self._justified(before, self._noise(), self._memory, before.makespan * _EQUAL))

    def save_memory(self) -> None:
        """Try to make the best schedule anew with less memory than it needs."""
        before = self.pool[0]
        memory = np.minimum(self._memory, before.peak / _EQUAL**1000)
        self._take(0, self._justified(before, self._noise(), memory, before.makespan * _EQUAL))

    def schedule(self, problem: Problem) -> Schedule | None:
        """The best schedule; None if there was none within the memory."""
        return schedule_of(problem, self.pool[0].orders, self.pool[0].starts) if self.pool else None

    def _take(self, chosen: int, found: _Candidate | None) -> None:
        before = self.pool[chosen]
        if found is not None and (found.makespan * _EQUAL < before.makespan or found.peak <= before.peak):
            self.pool[chosen] = found
            self.pool.sort(key=lambda one: one.makespan)

    def _dispatched(self, dates: DueDates, most_live: Ints, limit: float) -> _Candidate | None:
        arrays, starts = self._arrays, np.zeros(self._still.shape)
        seconds, size = placed(arrays, dates.orders)
        due, limits = due_dates(arrays, dates), (most_live, self._memory, self._patience(), limit)
        result = dispatch(arrays, seconds, size, due, arrays.around[1], *limits, starts)
        return self._found(dates.orders, starts, most_live, result)

    def _justified(self, of: _Candidate, noise: Doubles, memory: Doubles, limit: float) -> _Candidate | None:
        starts, limits = np.zeros(self._still.shape), (of.most_live, memory, self._patience(), limit)
        result = justified(self._arrays, of.orders, of.starts, noise, *limits, starts)
        return self._found(of.orders, starts, of.most_live, result)

    def _found(
        self, orders: Ints, starts: Doubles, most_live: Ints, result: tuple[float, float, int]
    ) -> _Candidate | None:
        makespan, peak, simulated = result
        self.simulated += simulated + _OVERHEAD
        return _Candidate(makespan, peak, orders, starts, most_live) if makespan < np.inf else None

    def _noise(self) -> Doubles:
        """Seconds to disturb due dates by."""
        return self._random.normal(0, self._task * self._random.choice((0.5, 2.0, 8.0)), self._still.shape)

    def _patience(self) -> float:
        """Seconds that devices may wait; mostly none."""
        return 2 * self._task * self._random.random() if self._random.random() < _PATIENT else 0.0

    def _reordered(self, of: Ints) -> Ints:
        """Two micro-batches swapped, or one moved."""
        line = self._random.choice(self._uneven)
        left, right = self._random.integers(self._counts[line], size=2)
        order = of[line, : self._counts[line]].tolist()
        if self._random.random() < 0.5:
            order[left], order[right] = order[right], order[left]
        else:
            order.insert(right, order.pop(left))
        orders = of.copy()
        orders[line, : len(order)] = order
        return orders
