"""Whether to draft at all: forecast before anything is drafted, and found out anew by probes while it does not pay."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from rlhfspec_mega.planning.acceptance import DEPTHS, TEMPERATURE_EDGES, AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel
from rlhfspec_mega.planning.tree import Batch, Floats, StepRecord

BINS = 32
WIDTH = 0.2  # of a bin, in log survival: the last one ends at a survival of 0.17%

RETHINK = 16  # steps after which forecasts, and whether drafting pays, are worked out anew
HOLD = 8  # plain steps that follow a decision not to draft, while no sample comes or goes: deciding takes time itself
MARGIN = 1.05  # of forecast rates: they are the best of many guesses, and leave out what a policy's own work takes
PAID_OVER = 32  # steps over which reading a backlog is counted
PROBE_SHARE = 0.01  # of the time may go into finding out whether drafting pays again
PROBE_LATEST = 1000  # plain steps after which that is found out whatever it costs


class StepView:
    """What a policy asks of a batch again and again within a step; `temperature` is that of all samples or None."""

    def __init__(self, batch: Batch, cost: CostModel) -> None:
        self.batch, self.size, self.kv_tokens = batch, batch.size, batch.kv_tokens
        self.least_remaining = int(batch.remaining.min())
        first = float(batch.temperatures[0])
        self.temperature = first if (batch.temperatures == first).all() else None
        self._cost = cost
        self._verify = np.zeros(0)

    def verify_seconds(self, count: int) -> Floats:
        """Seconds of verifying 0, 1, .. count - 1 draft tokens."""
        if len(self._verify) < count:
            tokens = np.arange(self.size, self.size + 2 * count, dtype=np.float64)
            self._verify = self._cost.verify_seconds(self.size, self.kv_tokens, tokens)
        return self._verify[:count]

    def draft_seconds(self, depth: int, drafted: int) -> float:
        """Seconds of drafting so many layers, with so many nodes after the first pass."""
        return self._cost.drafting(self.size, self.kv_tokens, self.batch.backlog, depth, drafted)


class Yield(NamedTuple):
    """Per sample, for trees of depth 1.. (rows) cut at falling survival thresholds (columns), all [D, BINS].

    Attributes:
        nodes: draft tokens with survival above the threshold.
        accepted: sum of their survival.
        drafted: those the draft must be run on to have them.
    """

    nodes: Floats
    accepted: Floats
    drafted: Floats


class Forecast:
    """Yields from an acceptance model, kept until `renew`.

    Samples differ: a sure one is worth more draft tokens than a doubtful one, so a mean alone would underrate a policy
    that picks. The population of nodes is therefore followed as a histogram over log survival: one more layer is its
    convolution with the distribution of log conditional acceptance over ranks and gaps. Sums of survival travel beside
    the counts and stay exact.
    """

    def __init__(self, acceptance: AcceptanceModel, width: int, depth: int) -> None:
        self._acceptance, self._width, self._depth = acceptance, width, depth
        self._of_class = lru_cache(self._population)

    def renew(self) -> None:
        """Forget what was worked out: the acceptance model has learnt since."""
        self._of_class.cache_clear()

    def of(self, batch: Batch) -> Yield:
        """Mean over the batch's samples, by their temperatures."""
        found = TEMPERATURE_EDGES.searchsorted(batch.temperatures)
        if (found == found[0]).all():
            return self._of_class(int(found[0]))
        classes, counts = np.unique(found, return_counts=True)
        parts = zip(*(self._of_class(int(each)) for each in classes), strict=True)
        return Yield(*(sum(s * y for s, y in zip(counts / batch.size, part, strict=True)) for part in parts))

    def _population(self, temperature_class: int) -> Yield:
        nodes, accepted = np.zeros((self._depth, BINS)), np.zeros((self._depth, BINS))
        counts = sums = np.eye(1, BINS)[0]  # the root: one node that is certain
        for depth in range(self._depth):
            known = min(depth, DEPTHS - 1)  # the last depth that is told apart stands for those below
            chances = self._acceptance.layer_table(temperature_class, known)[: self._width]
            shares = np.broadcast_to(self._acceptance.gap_weights(temperature_class, known), chances.shape)
            bins = np.minimum(np.rint(-np.log(chances) / WIDTH).astype(np.int64), BINS - 1).ravel()
            counts = np.convolve(counts, np.bincount(bins, shares.ravel(), BINS))[:BINS]
            sums = np.convolve(sums, np.bincount(bins, (shares * chances).ravel(), BINS))[:BINS]
            nodes[depth], accepted[depth] = counts.cumsum(), sums.cumsum()
        nodes, accepted = nodes.cumsum(axis=0), accepted.cumsum(axis=0)
        drafted = np.vstack((np.zeros(BINS), nodes[:-1]))
        return Yield(nodes, accepted, drafted)


def drafting_rate(expected: Yield, cost: CostModel, batch: Batch, usable: int, max_nodes: int, whole: bool) -> float:
    """The best forecast tokens per second of a batch over depths up to `usable` and survival thresholds.

    Args:
        max_nodes: draft tokens of a sample, at most.
        whole: see `Payoff`.
    """
    size, kv = batch.size, batch.kv_tokens
    layers = slice(usable - 1 if whole else 0, usable)
    nodes = expected.nodes[layers]
    depths = np.arange(layers.start + 1.0, usable + 1)[:, None]
    # What has piled up over plain steps is read once and serves all steps to come.
    backlog = min(batch.backlog, size + batch.backlog // PAID_OVER)
    seconds = cost.draft_seconds(size, kv, backlog, depths, size * expected.drafted[layers])
    seconds = seconds + cost.verify_seconds(size, kv, size * (1.0 + nodes))
    rates = size * (1.0 + expected.accepted[layers]) / seconds
    return float(np.where(nodes <= max_nodes, rates, 0.0).max())


class Payoff:
    """Compares the forecast rate of drafting with that of a plain step.

    Args:
        whole: all usable layers are always drafted; else drafting may end after any.

    Attributes:
        probing: the step of now drafts one layer only to learn.
    """

    def __init__(
        self, acceptance: AcceptanceModel, cost: CostModel, width: int, depth: int, max_nodes: int, whole: bool
    ) -> None:
        self._acceptance, self._cost = acceptance, cost
        self._max_nodes, self._whole = max_nodes, whole
        self._forecast = Forecast(acceptance, width, depth)
        self._steps = self._plain_steps = 0
        self._held_size = self._held_until = 0
        self.probing = False
        self._pays: dict[tuple[int, int], bool] = {}  # by batch size and usable depth, for the next few steps

    def holds(self, batch: Batch) -> bool:
        """Whether a decision not to draft still stands."""
        return batch.size == self._held_size and self._steps < self._held_until

    def depth(self, step: StepView, usable: int) -> int:
        """All usable layers if drafting is forecast to pay, else 0, or 1 for a probe."""
        self.probing = False
        if usable == 0:
            return 0
        plain = float(step.verify_seconds(1)[0])
        key = step.size, usable
        if key not in self._pays:
            expected = self._forecast.of(step.batch)
            rate = drafting_rate(expected, self._cost, step.batch, usable, self._max_nodes, self._whole)
            self._pays[key] = rate > MARGIN * step.size / plain
        if self._pays[key]:
            return usable
        self.probing = self._probe_is_due(step, plain)
        if not self.probing:
            self._held_size, self._held_until = step.size, self._steps + HOLD
        return int(self.probing)

    def observe(self, record: StepRecord) -> None:
        """After a step, and after the models learnt from it."""
        self._steps += 1
        if self.probing or self._steps % RETHINK == 0:  # a probe is there to be heeded at once
            self._forecast.renew()
            self._pays.clear()
        self.probing = False
        self._plain_steps = 0 if record.tree.depth else self._plain_steps + 1

    def _probe_is_due(self, step: StepView, plain: float) -> bool:
        """Whether the time a probe would lose is within its share of the plain steps since the last draft."""
        if self._plain_steps >= PROBE_LATEST:
            return True
        chances = self._acceptance.expected_layer(1, float(step.batch.temperatures.max()))
        seconds = step.draft_seconds(1, 0)
        seconds += float(self._cost.verify_seconds(step.size, step.kv_tokens, 2 * step.size))
        lost = seconds - plain * (1.0 + float(chances[0])) / MARGIN
        return lost <= PROBE_SHARE * plain * self._plain_steps
