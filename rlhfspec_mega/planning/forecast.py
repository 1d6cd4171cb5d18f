"""What drafting is forecast to give, before anything is drafted."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from rlhfspec_mega.planning.acceptance import DEPTHS, AcceptanceModel, temperature_classes
from rlhfspec_mega.planning.cost import CostModel
from rlhfspec_mega.planning.tree import Batch, Floats, Ints

BINS = 32
WIDTH = 0.2  # of a bin, in -log survival: the last bin ends at a survival of 0.17%

# The forecast rate of drafting must exceed the plain rate by this factor: it is the best of many estimates, and leaves
# out the policy's own time.
MARGIN = 1.05
BACKLOG_STEPS = 32  # steps over which the cost of reading a backlog is spread


class StepView:
    """A batch with its costs, which a policy reads several times per step.

    Attributes:
        plain_seconds: of a plain step.
    """

    def __init__(self, batch: Batch, cost: CostModel) -> None:
        self.batch, self.size, self.kv_tokens = batch, batch.size, batch.kv_tokens
        self._cost = cost
        self.plain_seconds = cost.plain_seconds(self.size, self.kv_tokens)
        self._verify = np.zeros(0)

    @cached_property
    def temperature(self) -> float | None:
        """That of all samples; None if they differ."""
        first = float(self.batch.temperatures[0])
        return first if (self.batch.temperatures == first).all() else None

    @cached_property
    def classes(self) -> Ints:
        """The temperature class of each sample."""
        return temperature_classes(self.batch)

    def verify_seconds(self, count: int) -> Floats:
        """Seconds [count] of a step that verifies 0, 1, .. count - 1 draft tokens, without drafting."""
        if len(self._verify) < count:
            self._verify = self._cost.verify_seconds_up_to(self.size, self.kv_tokens, count)
        return self._verify[:count]

    def draft_seconds(self, depth: int, drafted: int) -> float:
        """Seconds of drafting `depth` layers, where passes after the first run on `drafted` nodes all together."""
        return self._cost.draft_seconds_scalar(self.size, self.kv_tokens, self.batch.backlog, depth, drafted)

    def draft_prices(self) -> tuple[float, float, Floats, Floats]:
        """The parts that `draft_seconds` is made of: see CostModel."""
        return self._cost.draft_prices(self.size, self.kv_tokens, self.batch.backlog)


class ExpectedTrees(NamedTuple):
    """Expected size and gain of a sample's tree, by depth (rows, from 1) and survival threshold (columns, falling).

    All three are [D, BINS].

    Attributes:
        nodes: draft tokens with survival above the threshold.
        accepted: accepted draft tokens: the sum of the survival of these nodes.
        drafted: nodes that the draft must be run on to produce them.
    """

    nodes: Floats
    accepted: Floats
    drafted: Floats


class Forecast:
    """Expected trees under an acceptance model, cached until `clear`.

    Samples differ, and a sample with a confident draft deserves more draft tokens than one with a doubtful draft; a
    forecast from mean acceptance alone would therefore underrate a policy that picks nodes. So the nodes are followed
    as a histogram over log survival: adding a layer convolves it with the distribution of log conditional acceptance
    over ranks and gaps. The sum of survival in each bin is tracked beside the counts, so it has no binning error.
    """

    def __init__(self, acceptance: AcceptanceModel, width: int, depth: int) -> None:
        self._acceptance, self._width, self._depth = acceptance, width, depth
        self._of_class = lru_cache(self._population)

    def clear(self) -> None:
        """Drop cached forecasts, because the acceptance model has learnt since."""
        self._of_class.cache_clear()

    def for_batch(self, batch: Batch) -> ExpectedTrees:
        """Mean over the batch's samples, which fall into temperature classes."""
        classes = temperature_classes(batch)
        if (classes == classes[0]).all():
            return self._of_class(int(classes[0]))
        classes, counts = np.unique(classes, return_counts=True)
        parts = zip(*(self._of_class(int(each)) for each in classes), strict=True)
        return ExpectedTrees(*(sum(s * y for s, y in zip(counts / batch.size, part, strict=True)) for part in parts))

    def _population(self, temperature_class: int) -> ExpectedTrees:
        nodes, accepted = np.zeros((self._depth, BINS)), np.zeros((self._depth, BINS))
        counts = sums = np.eye(1, BINS)[0]  # the root: one node of survival 1
        for depth in range(self._depth):
            known = min(depth, DEPTHS - 1)  # the acceptance model treats all deeper layers as its last one
            acceptance = self._acceptance.layer_table(temperature_class, known)[: self._width]
            shares = np.broadcast_to(self._acceptance.gap_weights(temperature_class, known), acceptance.shape)
            bins = np.minimum(np.rint(-np.log(acceptance) / WIDTH).astype(np.int64), BINS - 1).ravel()
            counts = np.convolve(counts, np.bincount(bins, shares.ravel(), BINS))[:BINS]
            sums = np.convolve(sums, np.bincount(bins, (shares * acceptance).ravel(), BINS))[:BINS]
            nodes[depth], accepted[depth] = counts.cumsum(), sums.cumsum()
        nodes, accepted = nodes.cumsum(axis=0), accepted.cumsum(axis=0)
        drafted = np.vstack((np.zeros(BINS), nodes[:-1]))
        return ExpectedTrees(nodes, accepted, drafted)


def drafting_rate(
    expected: ExpectedTrees, cost: CostModel, batch: Batch, usable: int, max_nodes: int, fixed_depth: bool
) -> float:
    """The highest forecast tokens per second of a batch, over depths up to `usable` and survival thresholds.

    Nodes below a survival threshold are not verified.

    Args:
        expected: the trees that a sample has on average.
        max_nodes: most draft tokens of a sample.
        fixed_depth: see `ModeChoice`.
    """
    size, kv = batch.size, batch.kv_tokens
    layers = slice(usable - 1 if fixed_depth else 0, usable)
    nodes = expected.nodes[layers]
    depths = np.arange(layers.start + 1.0, usable + 1)[:, None]
    # A backlog from plain steps is read once and serves all later steps.
    backlog = min(batch.backlog, size + batch.backlog // BACKLOG_STEPS)
    seconds = cost.draft_seconds(size, kv, backlog, depths, size * expected.drafted[layers])
    seconds = seconds + cost.verify_seconds(size, kv, size * (1.0 + nodes))
    rates = size * (1.0 + expected.accepted[layers]) / seconds
    return float(np.where(nodes <= max_nodes, rates, 0.0).max())


def recalled_rate(step: StepView) -> float:
    """The highest tokens per second of a batch with the draft tokens that earlier text gives, and no others."""
    if not len(step.batch.recalled):
        return 0.0
    tokens = step.size + np.concatenate(([0.0], np.sort(step.batch.recalled)[::-1].cumsum()))
    return float((tokens / step.verify_seconds(len(tokens))).max())
