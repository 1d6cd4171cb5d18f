"""Due dates of tasks, as a periodic schedule would have them: a few numbers for each model determine them."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import numpy as np

from rlhfspec_mega.compiled import compiled
from rlhfspec_mega.planning.pipeline.dispatch import Arrays, Ints
from rlhfspec_mega.planning.pipeline.problem import Doubles, Problem

LIMITED = 0.4  # share of draws that limit live micro-batches


class DueDates(NamedTuple):
    """What due dates are made from.

    They are counted backwards from the end. A backward is due before the backwards of the same micro-batch on earlier
    stages, and before the later micro-batches of its node; a forward is due before its backward.

    Attributes:
        orders: [L, M] micro-batches in the order in which a pipeline takes them.
        pace: [L] seconds that a second of later micro-batches' work is expected to take.
        stretch, lead: [L] a forward is due `stretch` times its chain, and `lead` seconds, before its backward.
        shift: [L] seconds added to all due dates of a pipeline.
    """

    orders: Ints
    pace: Doubles
    stretch: Doubles
    lead: Doubles
    shift: Doubles


@compiled
def due_dates(arrays: Arrays, wanted: DueDates) -> Doubles:
    """Due dates [2V, M] by place."""
    due = np.zeros(arrays.durations.shape)
    for line in range(len(arrays.first) - 1):
        for node in range(arrays.first[line], arrays.first[line + 1]):
            rest = 0.0
            for place in range(arrays.counts[node] - 1, -1, -1):
                batch = wanted.orders[line, place]
                end = wanted.shift[line] - wanted.pace[line] * rest - arrays.tails[node, batch]
                due[2 * node, place] = end - wanted.stretch[line] * arrays.chains[node, batch] - wanted.lead[line]
                due[2 * node + 1, place] = end
                rest += arrays.durations[2 * node, batch] + arrays.durations[2 * node + 1, batch]
    return due


class Lots:
    """Draws due dates at random, but for orders alike for a model's pipelines. The same seed gives the same ones."""

    def __init__(self, problem: Problem, arrays: Arrays, seed: int) -> None:
        pipelines = problem.pipelines
        self._random = random.Random(seed)  # several times faster than numpy's, a number at a time
        self._models = np.array([one.model for one in pipelines])
        self._lengths = [one.lengths for one in pipelines]
        self._line_of = np.repeat(np.arange(len(pipelines)), [one.stages for one in pipelines])
        self._stages_left = np.concatenate([np.arange(one.stages, 0, -1) for one in pipelines])
        self._most = arrays.activation.shape[1]
        self._span = problem.mean_task * max(one.stages for one in pipelines)

    def draw_most_live(self) -> Ints:
        """[V] limits of live micro-batches: none, or at random, at least as many as 1F1B has."""
        draw = self._random
        if draw.random() >= LIMITED:
            return np.full(len(self._stages_left), self._most)
        extra = np.array([draw.uniform(0, self._stages_left.max() + 1) for _ in range(2)]).astype(np.int64)
        return self._stages_left + extra[self._models[self._line_of]]

    def draw(self) -> DueDates:
        """Due dates at random."""
        draw, models = self._random, self._models

        def of_models(low: float, high: float) -> Doubles:
            return np.array([draw.uniform(low, high), draw.uniform(low, high)])[models]

        orders = np.zeros((len(models), self._most), np.int64)
        for line, lengths in enumerate(self._lengths):
            orders[line, : len(lengths)] = self._order(lengths)
        return DueDates(
            orders,
            of_models(0.6, 2.2),
            of_models(0.2, 1.8),
            of_models(-0.2, 2.0) * self._span,
            draw.gauss(0, 1.5 * self._span) * models,  # of the second model against the first
        )

    def _order(self, lengths: Doubles) -> Ints:
        """Micro-batches roughly by rising, then by falling duration: a pipeline fills and drains with short ones."""
        draw = self._random
        if np.ptp(lengths) == 0:
            return np.arange(len(lengths))
        noise = draw.choice((0.0, 0.1, 0.3))
        rising = np.argsort([length * math.exp(draw.gauss(0, noise)) for length in lengths], kind="stable")
        if draw.random() < 0.5:
            first = np.arange(len(rising)) % 2 == 0
        else:
            share = draw.random()
            first = np.array([draw.random() < share for _ in lengths])
        return np.concatenate([rising[first], rising[~first][::-1]])
