"""What drafting would yield on average, before anything is drafted: draft tokens against accepted ones, by depth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlhfspec_mega.planning.acceptance import DEPTHS, TEMPERATURE_EDGES, AcceptanceModel
from rlhfspec_mega.planning.tree import Batch, Floats

BINS = 32
WIDTH = 0.2  # of a bin, in log survival: the last one ends at a survival of 0.17%


@dataclass(frozen=True)
class Yield:
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
        self._acceptance = acceptance
        self._width = width
        self._depth = depth
        self._yields: dict[int, Yield] = {}

    def renew(self) -> None:
        """Forget what was worked out: the acceptance model has learnt since."""
        self._yields.clear()

    def of(self, batch: Batch) -> Yield:
        """Mean over the batch's samples, by their temperatures."""
        found = TEMPERATURE_EDGES.searchsorted(batch.temperatures)
        if (found == found[0]).all():
            return self._of_class(int(found[0]))
        classes, counts = np.unique(found, return_counts=True)
        yields = [self._of_class(int(each)) for each in classes]
        shares = counts / batch.size
        names = ("nodes", "accepted", "drafted")
        return Yield(*(sum(s * getattr(y, name) for s, y in zip(shares, yields, strict=True)) for name in names))

    def _of_class(self, temperature_class: int) -> Yield:
        if temperature_class not in self._yields:
            self._yields[temperature_class] = self._population(temperature_class)
        return self._yields[temperature_class]

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
