"""Chooses one number of draft tokens for all samples of a batch, in chains or trees, for SGLang.

For trees, the predicted probability that a child is the target's choice is softmax(s * (log q + g)), with the draft's
probabilities q, the shared Gumbel noise g, and a factor s that is learnt from outcomes. It would be exact if, for each
token, log p - log q (p: the target's probabilities) were independent Gumbel noise of scale 1 / s.
The survival of a node is the product of these probabilities along its path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhfspec_mega.errors import UserError

# Prior probability that a draft token is accepted if its parent was, and the outcomes that it counts as. It is high, so
# that drafting is tried.
PRIOR_ACCEPTANCE, PRIOR_OUTCOMES = 0.7, 4.0
MAX_OUTCOMES = 200.0  # outcomes that count at each depth; older ones lose weight
# Factor on the weight of past outcomes in each plain step. The prior gains weight in time, so drafting is tried again.
PLAIN_STEP_DECAY = 0.99
MIN_SHARPNESS, MAX_SHARPNESS = 0.25, 32.0
INITIAL_SHARPNESS = 2.0
SHARPNESS_RATE = 0.05  # change of log s per step and token of error
MARGIN = 1.05  # gain in rate that is needed to change the number, because changing CUDA graphs takes time


@dataclass(frozen=True)
class StepTable:
    """Measured seconds of decode steps, drafting included.

    Attributes:
        batches: batch sizes, ascending from 1 or more.
        counts: draft tokens of each sample, ascending.
        seconds: [batches, counts].

    Raises UserError for tables that do not have this form, and for times that are not above 0.
    """

    batches: tuple[int, ...]
    counts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        rows = len(self.seconds) == len(self.batches) > 0 and all(len(r) == len(self.counts) for r in self.seconds)
        ascending = all(sorted(set(axis)) == list(axis) for axis in (self.batches, self.counts))
        if not rows or not ascending or not self.counts or self.batches[0] < 1 or self.counts[0] < 0:
            raise UserError(
                f"A table of step times has batches {self.batches} and draft token counts {self.counts}: both must "
                "ascend, from 1 and 0 or more, and each pair needs one time."
            )
        if not all(np.isfinite(value) and value > 0 for row in self.seconds for value in row):
            raise UserError("A table of step times has a time that is not above 0: measure again.")

    def seconds_at(self, batch: int) -> list[float]:
        """Seconds by count; linear between batches and beyond the last, where they do not fall."""
        found = []
        for column in zip(*self.seconds, strict=True):
            seconds = float(np.interp(batch, self.batches, column))
            if batch > self.batches[-1] and len(self.batches) > 1:
                slope = (column[-1] - column[-2]) / (self.batches[-1] - self.batches[-2])
                seconds += max(slope, 0.0) * (batch - self.batches[-1])
            found.append(seconds)
        return found

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StepTable:
        """The table that `as_json` has written. Raises UserError for any other data."""
        try:
            rows = tuple(tuple(map(float, row)) for row in data["seconds"])
            return cls(tuple(map(int, data["batches"])), tuple(map(int, data["counts"])), rows)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"This is not a table of step times: {error!r}.") from error


class DepthAcceptance:
    """How often a draft token of each depth is accepted if its parent was, learnt from the accepted length of steps.

    The estimate of each depth is shrunk towards that of the depth above, and that of the first depth towards a prior.

    Args:
        depth: layers, at most.
    """

    def __init__(self, depth: int) -> None:
        self._accepted, self._tried = np.zeros(depth), np.zeros(depth)

    def expected(self) -> list[float]:
        """Expected accepted draft tokens per step [depth + 1], by the number of drafted layers from 0 on."""
        expected, acceptance, survival = [0.0], PRIOR_ACCEPTANCE, 1.0
        for accepted, tried in zip(self._accepted.tolist(), self._tried.tolist(), strict=True):
            acceptance = (accepted + PRIOR_OUTCOMES * acceptance) / (tried + PRIOR_OUTCOMES)
            survival *= acceptance
            expected.append(expected[-1] + survival)
        return expected

    def observe(self, depth: int, accepted: Sequence[int]) -> None:
        """Learn from a step: the drafted layers, and the number of accepted draft tokens of each sample."""
        if not depth:
            self._accepted *= PLAIN_STEP_DECAY
            self._tried *= PLAIN_STEP_DECAY
            return
        counts, depths = np.minimum(np.asarray(accepted, np.int64), depth), np.arange(depth)
        self._accepted[:depth] += (counts[:, None] > depths).sum(axis=0)
        self._tried[:depth] += (counts[:, None] >= depths).sum(axis=0)
        share = np.minimum(1.0, MAX_OUTCOMES / np.maximum(self._tried, 1.0))
        self._accepted *= share
        self._tried *= share


class ChainLength:
    """Chooses n for chains of n draft tokens per sample, by the rate B (1 + E[accepted]) / seconds of a step.

    The choice depends only on what was observed. So tensor-parallel ranks decide alike, since they observe the same
    acceptance and hold the same table.

    Args:
        table: times of steps with samples of typical length. Its counts are the numbers to choose from, with or without
            0 (plain decoding).
    """

    def __init__(self, table: StepTable) -> None:
        self.table = table
        self._depths = DepthAcceptance(table.counts[-1])
        self._current = table.counts[-1]

    def expected_accepted(self) -> list[float]:
        """Expected accepted draft tokens per step of a sample, by index in the table's counts."""
        expected = self._depths.expected()
        return [expected[count] for count in self.table.counts]

    def choose(self, batch: int) -> int:
        """The number of draft tokens for this batch size: the previous one unless another is better by MARGIN."""
        rates = self.rates(batch)
        best = max(rates, key=rates.__getitem__)
        if rates[best] > MARGIN * rates[self._current]:
            self._current = best
        return self._current

    def rates(self, batch: int) -> dict[int, float]:
        """Expected tokens per second of a batch, by number of draft tokens."""
        rows = zip(self.table.counts, self.expected_accepted(), self.table.seconds_at(batch), strict=True)
        return {count: batch * (1.0 + accepted) / seconds for count, accepted, seconds in rows}

    def observe(self, drafted: int, accepted: Sequence[int]) -> None:
        """Learn from a step: draft tokens per sample, and the number of accepted ones of each sample."""
        self._depths.observe(drafted, accepted)


class Sharpness:
    """The factor s of the module's docstring, learnt from accepted lengths: a larger s predicts longer ones.

    Attributes:
        value: s.
    """

    def __init__(self) -> None:
        self.value = INITIAL_SHARPNESS

    def observe(self, predicted: float, realised: float) -> None:
        """Learn from a step: predicted and realised accepted draft tokens per sample."""
        moved = self.value * math.exp(SHARPNESS_RATE * (realised - predicted))
        self.value = min(max(moved, MIN_SHARPNESS), MAX_SHARPNESS)


class TreeSize(ChainLength):
    """Chooses n for trees of n draft tokens per sample, by the rate B (1 + E[accepted]) / seconds of a step.

    E[accepted] is the summed survival of the n best nodes of each sample in the latest observed tree, down to the depth
    that n is drafted to. For layers beyond the depth of this tree, accepted lengths are used as for chains. The weight
    of the tree decays with plain steps.

    Args:
        table: see ChainLength.
        depth: most layers of a tree. Fewer draft tokens than this are drafted in as many layers as there are tokens.
    """

    def __init__(self, table: StepTable, depth: int) -> None:
        super().__init__(table)
        self._layers = [min(count, depth) for count in table.counts]
        self._depths = DepthAcceptance(self._layers[-1])
        self._tree_accepted: list[float] = [0.0] * len(table.counts)  # expected in the latest tree, by index of count
        self._tree_depth = 1
        self._tree_weight = 0.0  # weight of the latest tree; the rest is that of accepted lengths

    def observe_tree(self, survival: NDArray[np.float32], depths: NDArray[np.int64], deepest: int) -> None:
        """Learn from the tree nodes of a step that drafted `deepest` layers.

        Args:
            survival: [B, M] of the M best nodes of each sample, falling; 0 if there are fewer.
            depths: [B, M] of these nodes, from 1.
        """
        self._tree_depth, self._tree_weight = deepest, 1.0
        whole = [0.0, *survival.mean(axis=0, dtype=np.float64).cumsum().tolist()]
        self._tree_accepted = [
            accepted_of_best(np.where(depths <= layers, survival, 0.0), count)
            if layers < deepest
            else whole[min(count, len(whole) - 1)]
            for count, layers in zip(self.table.counts, self._layers, strict=True)
        ]

    def expected_accepted(self) -> list[float]:
        """Expected accepted draft tokens per step of a sample, by index in the table's counts."""
        by_depth, found = self._depths.expected(), []
        for seen, layers in zip(self._tree_accepted, self._layers, strict=True):
            beyond = by_depth[layers] / by_depth[self._tree_depth] if layers > self._tree_depth else 1.0
            found.append(self._tree_weight * seen * beyond + (1.0 - self._tree_weight) * by_depth[layers])
        return found

    def observe(self, drafted: int, accepted: Sequence[int]) -> None:
        """Learn from a step: draft tokens per sample, and the number of accepted ones of each sample."""
        self._depths.observe(min(drafted, self._layers[-1]), accepted)
        if not drafted:
            self._tree_weight *= PLAIN_STEP_DECAY


def accepted_of_best(survival: NDArray[np.float32], count: int) -> float:
    """Expected accepted draft tokens per sample if the `count` best nodes of each are verified; survival is [B, M]."""
    if not count:
        return 0.0
    count = min(count, survival.shape[1])
    best = np.partition(survival, -count, axis=1)[:, -count:]
    return float(best.sum(dtype=np.float64)) / len(survival)
