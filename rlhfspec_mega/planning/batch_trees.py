"""One number of draft tokens for a whole batch, drafted as trees: for engines whose trees all have the same size.

The chance that a child is the target's choice is a softmax of perturbed scores: were log p - log q Gumbel noise of
scale 1 / s, of every token anew, it would be that of s times (log q + g). A path survives with the product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlhfspec_mega.planning.chain import KEPT, ChainLength, DepthAcceptance, StepTable

LEAST_SHARPNESS, MOST_SHARPNESS = 0.25, 32.0
START = 2.0  # sharpness of a draft of which nothing is known
RATE = 0.05  # of learning, per step and token of error


class Sharpness:
    """The s above, learnt from what was predicted and what came: sharper scores predict more.

    Attributes:
        value: s.
    """

    def __init__(self) -> None:
        self.value = START

    def observe(self, predicted: float, realised: float) -> None:
        """Draft tokens accepted per sample of a step."""
        moved = self.value * math.exp(RATE * (realised - predicted))
        self.value = min(max(moved, LEAST_SHARPNESS), MOST_SHARPNESS)


class TreeSize(ChainLength):
    """Chooses n for trees of n draft tokens per sample, by the rate B (1 + E[accepted]) / seconds of a step.

    E[accepted] is what the n likeliest nodes of each sample promised in the latest step known, down to the depth that n
    is drafted to. Where that step was not drafted so deep, the rest is as for chains: by how deep others were accepted.
    What was seen fades with steps that draft nothing.

    Args:
        table: see ChainLength.
        depth: layers that are drafted at most; fewer draft tokens than layers are drafted to as many layers.
    """

    def __init__(self, table: StepTable, depth: int) -> None:
        super().__init__(table)
        self._layers = [min(count, depth) for count in table.counts]
        self._depths = DepthAcceptance(self._layers[-1])
        self._seen: list[float] = [0.0] * len(table.counts)  # promised, by number of the table
        self._seen_depth = 1
        self._known = 0.0  # weight of what was seen; the rest is hope

    def look(self, survival: NDArray[np.float32], depths: NDArray[np.int64], deepest: int) -> None:
        """The nodes of a step that drafted `deepest` layers.

        Args:
            survival: [B, M], each sample's likeliest nodes, falling; 0 where there are fewer.
            depths: [B, M], theirs.
        """
        self._seen_depth, self._known = deepest, 1.0
        whole = [0.0, *survival.mean(axis=0, dtype=np.float64).cumsum().tolist()]
        self._seen = [
            promised(np.where(depths <= layers, survival, 0.0), count)
            if layers < deepest
            else whole[min(count, len(whole) - 1)]
            for count, layers in zip(self.table.counts, self._layers, strict=True)
        ]

    def expected_accepted(self) -> list[float]:
        """Draft tokens accepted per step of a sample, by number of the table."""
        by_depth, found = self._depths.expected(), []
        for seen, layers in zip(self._seen, self._layers, strict=True):
            beyond = by_depth[layers] / by_depth[self._seen_depth] if layers > self._seen_depth else 1.0
            found.append(self._known * seen * beyond + (1.0 - self._known) * by_depth[layers])
        return found

    def observe(self, drafted: int, accepted: Sequence[int]) -> None:
        """After a step: draft tokens per sample, and how many of them were accepted of each."""
        self._depths.observe(min(drafted, self._layers[-1]), accepted)
        if not drafted:
            self._known *= KEPT


def promised(survival: NDArray[np.float32], count: int) -> float:
    """Draft tokens accepted per sample if the `count` likeliest nodes of each are verified; `survival` is [B, M]."""
    if not count:
        return 0.0
    count = min(count, survival.shape[1])
    best = np.partition(survival, -count, axis=1)[:, -count:]
    return float(best.sum(dtype=np.float64)) / len(survival)
