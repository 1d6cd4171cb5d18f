"""One number of draft tokens for a whole batch, as chains or as trees: for engines whose samples all get as many.

Of trees the chance that a child is the target's choice is a softmax of perturbed scores: were log p - log q Gumbel
noise of scale 1 / s, of every token anew, it would be that of s times (log q + g). A path survives with the product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhfspec_mega.errors import UserError

PRIOR_CHANCE, PRIOR_OUTCOMES = 0.7, 4.0  # that a draft token is accepted if its parent was: hopeful
MOST_OUTCOMES = 200.0  # that count at a depth; older ones fade
KEPT = 0.99  # of what is known, per plain step: in time the hopeful prior has drafting tried again
LEAST_SHARPNESS, MOST_SHARPNESS = 0.25, 32.0
START = 2.0  # sharpness of a draft of which nothing is known
RATE = 0.05  # of learning it, per step and token of error
MARGIN = 1.05  # of the rate that another number must promise: changing graphs is not free


@dataclass(frozen=True)
class StepTable:
    """Measured seconds of decode steps, drafting included.

    Attributes:
        batches: samples, ascending from 1 or more.
        counts: draft tokens of each sample, ascending.
        seconds: by batch, then by count.
    """

    batches: tuple[int, ...]
    counts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        rows = len(self.seconds) == len(self.batches) > 0 and all(len(r) == len(self.counts) for r in self.seconds)
        ascending = all(sorted(set(axis)) == list(axis) for axis in (self.batches, self.counts))
        if not rows or not ascending or not self.counts or self.batches[0] < 1 or self.counts[0] < 0:
            raise UserError(f"A table of step times needs one row for each of {self.batches}, of {self.counts}.")
        if not all(np.isfinite(value) and value > 0 for row in self.seconds for value in row):
            raise UserError("A table of step times has a time that is not above 0.")

    def of(self, batch: int) -> list[float]:
        """Seconds by count; straight lines between the batches and beyond the last, where they do not fall."""
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
        """Of `as_json`. Raises UserError for anything else."""
        try:
            rows = tuple(tuple(map(float, row)) for row in data["seconds"])
            return cls(tuple(map(int, data["batches"])), tuple(map(int, data["counts"])), rows)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"This is not a table of step times: {error!r}.") from error


class DepthAcceptance:
    """How often a draft token of each depth is accepted if the one above it was, from how deep steps were accepted.

    Shrunk towards that of the depth above, the first one's towards a prior.
    """

    def __init__(self, depth: int) -> None:
        self._accepted, self._tried = np.zeros(depth), np.zeros(depth)

    def expected(self) -> list[float]:
        """Draft tokens accepted per step, by depth that is drafted to, 0 and up: chances multiply."""
        expected, chance, survival = [0.0], PRIOR_CHANCE, 1.0
        for accepted, tried in zip(self._accepted.tolist(), self._tried.tolist(), strict=True):
            chance = (accepted + PRIOR_OUTCOMES * chance) / (tried + PRIOR_OUTCOMES)
            survival *= chance
            expected.append(expected[-1] + survival)
        return expected

    def observe(self, depth: int, accepted: Sequence[int]) -> None:
        """After a step: layers drafted, and how many draft tokens were accepted of each sample."""
        if not depth:
            self._accepted *= KEPT
            self._tried *= KEPT
            return
        counts, depths = np.minimum(np.asarray(accepted, np.int64), depth), np.arange(depth)
        self._accepted[:depth] += (counts[:, None] > depths).sum(axis=0)
        self._tried[:depth] += (counts[:, None] >= depths).sum(axis=0)
        share = np.minimum(1.0, MOST_OUTCOMES / np.maximum(self._tried, 1.0))
        self._accepted *= share
        self._tried *= share


class ChainLength:
    """Chooses n for chains of n draft tokens per sample, by the rate B (1 + E[accepted]) / seconds of a step.

    Deterministic in what it was shown, so that tensor-parallel ranks, which see the same acceptance and hold the same
    cost table, decide alike.

    Args:
        table: of steps with samples of typical length; its counts are the numbers to choose from, 0 (plain decoding)
            among them or not.
    """

    def __init__(self, table: StepTable) -> None:
        self.table = table
        self._depths = DepthAcceptance(table.counts[-1])
        self._now = table.counts[-1]

    def expected_accepted(self) -> list[float]:
        """Draft tokens accepted per step of a sample, by number of the table."""
        expected = self._depths.expected()
        return [expected[count] for count in self.table.counts]

    def choose(self, batch: int) -> int:
        """The number for a batch of so many samples; that of the last step unless another promises more."""
        rates = self.rates(batch)
        best = max(rates, key=rates.__getitem__)
        if rates[best] > MARGIN * rates[self._now]:
            self._now = best
        return self._now

    def rates(self, batch: int) -> dict[int, float]:
        """Expected tokens per second of a batch, by number of draft tokens."""
        rows = zip(self.table.counts, self.expected_accepted(), self.table.of(batch), strict=True)
        return {count: batch * (1.0 + accepted) / seconds for count, accepted, seconds in rows}

    def observe(self, drafted: int, accepted: Sequence[int]) -> None:
        """After a step: draft tokens per sample, and how many of them were accepted of each."""
        self._depths.observe(drafted, accepted)


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
