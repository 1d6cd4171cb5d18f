"""One number of draft tokens for a whole batch, drafted as a chain: for engines that can verify nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.planning.cost import CostModel

PRIOR_CHANCE, PRIOR_OUTCOMES = 0.7, 4.0  # that a draft token is accepted if its parent was: hopeful
MOST_OUTCOMES = 200.0  # that count at a depth; older ones fade
KEPT = 0.99  # of what is known, per plain step: in time the hopeful prior has drafting tried again
MARGIN = 1.05  # of the rate that another number must promise: changing graphs is not free


class ChainLength:
    """Chooses n for chains of n draft tokens per sample, by the rate B (1 + E[accepted]) / seconds of a step.

    E[accepted] = sum over depths of the product of conditional acceptance down to them, counted per depth and shrunk
    towards that of the depth above, the first one's towards a prior. Deterministic in what it was shown, so that
    tensor-parallel ranks, which see the same acceptance and hold the same cost table, decide alike.

    Args:
        candidates: numbers to choose from, 0 (plain decoding) among them or not.
        cost: of a step; fixed.
        length: tokens of prompt and response of a typical sample: engines do not tell the KV they hold.

    Raises UserError for no candidates or one below 0.
    """

    def __init__(self, candidates: Sequence[int], cost: CostModel, length: int) -> None:
        self.candidates = tuple(sorted(set(candidates)))
        if not self.candidates or self.candidates[0] < 0:
            raise UserError(f"Numbers of draft tokens are 0 or more, at least one of them; got {list(candidates)}.")
        self._cost, self._length = cost, length
        self._accepted = np.zeros(self.candidates[-1])
        self._tried = np.zeros(self.candidates[-1])
        self._now = self.candidates[-1]

    def expected_accepted(self) -> list[float]:
        """By number of draft tokens, 0 and up."""
        expected, chance, survival = [0.0], PRIOR_CHANCE, 1.0
        for accepted, tried in zip(self._accepted.tolist(), self._tried.tolist(), strict=True):
            chance = (accepted + PRIOR_OUTCOMES * chance) / (tried + PRIOR_OUTCOMES)
            survival *= chance
            expected.append(expected[-1] + survival)
        return expected

    def choose(self, batch: int) -> int:
        """The number for a batch of so many samples; that of the last step unless another promises more."""
        accepted, kv = self.expected_accepted(), batch * self._length

        def rate(count: int) -> float:
            # The first pass reads the whole width of the last step, in steps without draft tokens too; every further
            # layer one token per sample.
            drafting = self._cost.drafting(batch, kv, batch * (1 + count), max(count, 1), batch * max(count - 1, 0))
            verifying = float(self._cost.verify_seconds(batch, kv, batch * (1 + count)))
            return batch * (1.0 + accepted[count]) / (drafting + verifying)

        best = max(self.candidates, key=rate)
        if rate(best) > MARGIN * rate(self._now):
            self._now = best
        return self._now

    def observe(self, drafted: int, accepted: Sequence[int]) -> None:
        """After a step: draft tokens per sample, and how many of them were accepted of each."""
        if not drafted:
            self._accepted *= KEPT
            self._tried *= KEPT
            return
        counts, depths = np.minimum(np.asarray(accepted, np.int64), drafted), np.arange(drafted)
        self._accepted[:drafted] += (counts[:, None] > depths).sum(axis=0)
        self._tried[:drafted] += (counts[:, None] >= depths).sum(axis=0)
        share = np.minimum(1.0, MOST_OUTCOMES / np.maximum(self._tried, 1.0))
        self._accepted *= share
        self._tried *= share
