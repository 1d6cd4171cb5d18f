"""Finds a fused schedule of short makespan and, among equals, of little activation memory.

Due dates are counted backwards from the end, as a periodic schedule would have them; a few numbers determine them
(settings.py). Many settings are drawn at random, and the best are improved step by step. RLHFuse (arXiv 2409.13221)
anneals the orders of tasks themselves, on hundreds of cores.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from rlhfspec_mega.planning.pipeline.baselines import in_turn
from rlhfspec_mega.planning.pipeline.bounds import lower_bound
from rlhfspec_mega.planning.pipeline.dispatch import as_arrays, dispatch, schedule_of
from rlhfspec_mega.planning.pipeline.greedy import greedy
from rlhfspec_mega.planning.pipeline.problem import Problem
from rlhfspec_mega.planning.pipeline.schedule import Schedule
from rlhfspec_mega.planning.pipeline.settings import Settings, Variation

QUICK_TASKS = 500_000  # tasks simulated for a plan of one update: 60 to 120 ms of one core
_ELITE = 4  # settings that are improved side by side
_DRAWN, _FOR_MEMORY = 0.4, 0.2  # shares of the effort for settings at random, and for less memory
_OVERHEAD = 200  # what preparing a simulation costs, in tasks
_EQUAL = 1 + 1e-9

Score = tuple[float, float]  # makespan, peak of activation bytes


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


class _Search:
    """Settings that were tried.

    Attributes:
        pool: the best (score, settings), the best one first.
        simulated: tasks of all schedules that were made.
    """

    def __init__(self, problem: Problem, known: Schedule, seed: int) -> None:
        self._arrays, self._known = as_arrays(problem), known.makespan
        self._starts = np.zeros(self._arrays.durations.shape)
        self._random = np.random.default_rng(seed)
        self._variation = Variation(problem, self._arrays, seed)
        self.pool: list[tuple[Score, Settings]] = []
        self.simulated = 0

    @property
    def best(self) -> float:
        """Makespan of the best schedule."""
        return min(self.pool[0][0][0], self._known) if self.pool else self._known

    def draw(self) -> None:
        """Try settings at random."""
        settings = self._variation.drawn()
        limit = self.pool[-1][0][0] if len(self.pool) == _ELITE else np.inf
        score = self._score(settings, limit)
        if score[0] < limit:
            self.pool = sorted([*self.pool, (score, settings)], key=lambda one: one[0])[:_ELITE]

    def improve(self) -> None:
        """Try a neighbour of one of the best settings, and keep it if it is no worse."""
        if not self.pool:
            self.draw()
            return
        # The first ones more often than the last, which are there in case that those are dead ends.
        chosen = int(self._random.integers(len(self.pool) + 2)) % len(self.pool)
        before, settings = self.pool[chosen]
        self._take(chosen, before, self._variation.neighbour(settings))

    def save_memory(self) -> None:
        """Try a neighbour of the best settings with less memory than their schedule needs."""
        before, settings = self.pool[0]
        less = np.minimum(settings.memory, before[1] / _EQUAL**1000)
        self._take(0, before, replace(self._variation.neighbour(settings), memory=less))

    def _take(self, chosen: int, before: Score, settings: Settings) -> None:
        score = self._score(settings, before[0] * _EQUAL)
        if score[0] < np.inf and (score[0] * _EQUAL < before[0] or score[1] <= before[1]):
            self.pool[chosen] = score, settings
            self.pool.sort(key=lambda one: one[0])

    def _score(self, settings: Settings, limit: float) -> Score:
        makespan, peak, simulated = dispatch(
            self._arrays,
            settings.dates,
            settings.most_live,
            settings.memory,
            settings.patience,
            limit,
            self._starts,
        )
        self.simulated += simulated + _OVERHEAD
        return makespan, peak

    def schedule(self, problem: Problem) -> Schedule | None:
        """The best schedule; None if no settings had one."""
        if not self.pool:
            return None
        settings = self.pool[0][1]
        self._score(settings, np.inf)
        return schedule_of(problem, settings.dates.orders, self._starts)
