"""What a schedule is made from (due dates, orders of micro-batches, limits), and how the search varies it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np

from rlhfspec_mega.planning.pipeline.dispatch import Arrays, DueDates, Ints
from rlhfspec_mega.planning.pipeline.problem import Doubles, Problem


@dataclass(frozen=True, eq=False)
class Settings:
    """See DueDates and dispatch."""

    dates: DueDates
    most_live: Ints
    patience: float
    memory: Doubles


class Variation:
    """Draws settings at random, and neighbours of given ones. The same seed gives the same ones."""

    def __init__(self, problem: Problem, arrays: Arrays, seed: int) -> None:
        pipelines = problem.pipelines
        self._arrays, self._memory = arrays, problem.capacities
        self._random = random.Random(seed)  # several times faster than numpy's, a number at a time
        self._models = np.array([one.model for one in pipelines])
        self._line_of = np.repeat(np.arange(len(pipelines)), [one.stages for one in pipelines])
        self._stages_left = np.concatenate([np.arange(one.stages, 0, -1) for one in pipelines])
        self._lengths = [(one.forward + one.backward).sum(axis=0) for one in pipelines]
        self._uneven = [line for line, lengths in enumerate(self._lengths) if np.ptp(lengths) > 0]
        self._task = float(arrays.work.sum() / problem.tasks)

    def drawn(self) -> Settings:
        """Settings at random, alike for the pipelines of a model."""
        draw, models = self._random, self._models
        lines, most = len(models), self._arrays.activation.shape[1]
        span = self._task * int(self._stages_left.max())

        def of_models(low: float, high: float) -> Doubles:
            return np.array([draw.uniform(low, high), draw.uniform(low, high)])[models]

        orders = np.zeros((lines, most), np.int64)
        for line, lengths in enumerate(self._lengths):
            orders[line, : len(lengths)] = self._drawn_order(line)
        shift = draw.gauss(0, 1.5 * span) * models[self._line_of]  # of the second model against the first
        dates = DueDates(
            orders,
            of_models(0.6, 2.2),
            of_models(0.2, 1.8),
            of_models(-0.2, 2.0) * span,
            np.repeat(shift, 2),
            np.zeros((2 * lines, most)),
        )
        most_live = np.full(len(self._line_of), most)
        if draw.random() < 0.25:
            extra = of_models(0, self._stages_left.max() + 1).astype(np.int64)
            most_live = self._stages_left + extra[self._line_of]
        patience = self._task * draw.random() if draw.random() < 0.15 else 0.0
        return Settings(dates, most_live, patience, self._memory)

    def neighbour(self, of: Settings) -> Settings:
        """Settings that differ from others in a few numbers."""
        dates, most_live, patience = of.dates, of.most_live, of.patience
        draw = self._random
        for _ in range(1 + (draw.random() < 0.5) + (draw.random() < 0.25)):
            what = draw.randrange(10)
            if what < 3 and self._uneven:
                dates = self._reordered(dates)
            elif what == 3:
                most_live = self._relimited(most_live)
            elif what == 4:
                patience = 0.0 if draw.random() < 0.5 else self._task * 2 * draw.random()
            else:
                dates = self._redated(dates)
        return Settings(dates, most_live, patience, of.memory)

    def _redated(self, of: DueDates) -> DueDates:
        """Other due dates of a model, a node, or neighbouring places."""
        draw = self._random
        line = draw.randrange(len(self._models))
        size = self._task * draw.choice((0.5, 2.0, 8.0)) * draw.gauss(0, 1)
        what = draw.randrange(5)
        if what < 3:
            alike = self._models == self._models[line]
            if what == 0:
                return of._replace(pace=np.where(alike, of.pace * math.exp(draw.gauss(0, 0.2)), of.pace))
            if what == 1:
                return of._replace(stretch=np.where(alike, of.stretch * math.exp(draw.gauss(0, 0.3)), of.stretch))
            return of._replace(lead=np.where(alike, of.lead + 2 * size, of.lead))
        if what == 3:
            by_place, most = of.by_place.copy(), of.by_place.shape[1]
            first = draw.randrange(most)
            by_place[2 * line + draw.randrange(2), first : first + draw.randint(1, 1 + most // 2)] += size
            return of._replace(by_place=by_place)
        by_node = of.by_node.copy()
        nodes = self._some_nodes(0.7)
        for way in ((0,), (1,), (0, 1))[draw.randrange(3)]:
            by_node[way::2][nodes] += size
        return of._replace(by_node=by_node)

    def _relimited(self, of: Ints) -> Ints:
        """Another limit of live micro-batches, of a node or of a pipeline."""
        found = of.copy()
        nodes = self._some_nodes(0.6)
        found[nodes] = np.maximum(found[nodes] + self._random.choice((-2, -1, 1, 2)), 1)
        return found

    def _some_nodes(self, one: float) -> slice:
        """A node, with probability `one`, or all nodes of a pipeline."""
        first = self._arrays.first
        if self._random.random() < one:
            node = self._random.randrange(int(first[-1]))
            return slice(node, node + 1)
        line = self._random.randrange(len(self._models))
        return slice(int(first[line]), int(first[line + 1]))

    def _reordered(self, of: DueDates) -> DueDates:
        """Two micro-batches swapped, or one moved."""
        draw = self._random
        line = draw.choice(self._uneven)
        left, right = (draw.randrange(len(self._lengths[line])) for _ in range(2))
        order = of.orders[line].tolist()
        if draw.random() < 0.5:
            order[left], order[right] = order[right], order[left]
        else:
            order.insert(right, order.pop(left))
        orders = of.orders.copy()
        orders[line] = order
        return of._replace(orders=orders)

    def _drawn_order(self, line: int) -> Ints:
        """Micro-batches roughly by rising, then by falling duration: a pipeline fills and drains with short ones."""
        draw, lengths = self._random, self._lengths[line]
        if line not in self._uneven:
            return np.arange(len(lengths))
        noise = draw.choice((0.0, 0.1, 0.3))
        rising = np.argsort([length * math.exp(draw.gauss(0, noise)) for length in lengths], kind="stable")
        if draw.random() < 0.5:
            first = np.arange(len(rising)) % 2 == 0
        else:
            share = draw.random()
            first = np.array([draw.random() < share for _ in lengths])
        return np.concatenate([rising[first], rising[~first][::-1]])
