"""What whole rollouts keep of the gains of their decode steps, and at which batch sizes their time is spent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlhfspec_mega.compiled import compiled
from rlhfspec_mega.planning.cost import CostModel
from rlhfspec_mega.planning.tree import Floats, Ints
from rlhfspec_mega.types import BATCH_BUCKETS, batch_bucket

# Before the first rollout all of the gain is taken to be kept; this counts as so many rollouts.
PRIOR_ROLLOUTS = 0.5
OLDER = 0.8  # weight of earlier rollouts after one in which all steps had draft tokens
NEWEST = 0.3  # weight of the newest rollout in the shares of batch sizes
MOST_SAMPLES = 4096  # of a rollout; there is nothing to learn from longer ones, in which batches stay large
OLDER_PLAIN = 0.99  # after any other: what was found is tried again some time


class WholeRollouts:
    """The share of the gains of single steps that whole rollouts keep, by bucket of their largest batch.

    The gain of a step compares it with a plain step of the same batch. But samples that plain steps would end together
    end one after the other with drafts, in steps with few samples, whose tokens take longer than those of large
    batches; and the draft reads prompts, which counts for no step. So whenever no sample is left,

        kept = seconds of the plain steps that these samples would have taken / seconds of plain steps of the batches
               that there were, for the same tokens
               * seconds of the steps without what the draft read late / seconds of the steps.

    Where lengths differ much, as they do in most rollouts, this is nearly 1; it is least for samples that all have the
    same length.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._kept = np.zeros((BATCH_BUCKETS, 2))  # decayed sums over rollouts: their weight, and that times `kept`
        self._shares = np.zeros((BATCH_BUCKETS, BATCH_BUCKETS))  # see `shares`
        self._begin()

    def _begin(self) -> None:
        self._lengths: dict[int, int] = {}  # tokens of the samples that have ended, by their number
        self._endless = False  # samples come all the time, and too many have ended to know them all
        self._largest, self._samples, self._kv_tokens = 0, 0, 0  # batch; sums over steps
        self._counted = self._seconds = self._unread_seconds = self._drafted_seconds = 0.0

    def kept(self, size: int) -> float:
        """The share that a rollout keeps which has or had a batch of this size."""
        weight, share = self._kept[batch_bucket(max(size, self._largest))].tolist()
        return (PRIOR_ROLLOUTS + share) / (PRIOR_ROLLOUTS + weight)

    def shares(self, size: int) -> Floats:
        """Shares [BATCH_BUCKETS] of the time at each batch size, in plain steps of a rollout that has or had a batch of
        this size; all 0 before the first one has ended."""
        return self._shares[batch_bucket(max(size, self._largest))]

    def add_step(
        self, size: int, kv_tokens: int, counted: float, seconds: float, reading: float, drafted: bool, steps: int = 1
    ) -> None:
        """Add a step, or several of the same batch size.

        Args:
            counted: seconds of plain steps of this size for the tokens that it gave.
            seconds, reading: what it took, and how much of that for reading what plain steps had left unread.
            drafted: whether it had draft tokens.
        """
        self._largest = max(self._largest, size)
        self._samples += size * steps
        self._kv_tokens += kv_tokens * steps
        self._counted += counted
        self._seconds += seconds
        self._unread_seconds += reading
        self._drafted_seconds += seconds if drafted else 0.0

    def ended(self, samples: Ints, tokens: Ints, left: int) -> None:
        """Samples have ended, or left the engine.

        Args:
            samples, tokens: of each its number, which rises in the order in which they came, and the response tokens
                that it got here.
            left: samples that are still decoded.
        """
        self._lengths.update(zip(samples.tolist(), tokens.tolist(), strict=True))
        if len(self._lengths) > MOST_SAMPLES:
            self._lengths.clear()
            self._endless = True
        if left == 0:
            if self._counted > 0.0 and not self._endless:
                self._settle()
            self._begin()

    def _settle(self) -> None:
        """Learn from a rollout that has ended."""
        bucket, plain = batch_bucket(self._largest), np.zeros(BATCH_BUCKETS)
        lengths = np.array([self._lengths[number] for number in sorted(self._lengths)])
        sizes, steps = plain_steps(lengths, self._largest)
        for size, count in zip(sizes.tolist(), steps.tolist(), strict=True):
            kv_tokens = size * self._kv_tokens // self._samples
            plain[batch_bucket(size)] += count * self._cost.plain_seconds(size, kv_tokens)
        whole, shares = float(plain.sum()), self._shares[bucket]
        shares += (NEWEST if shares.any() else 1.0) * (plain / whole - shares)
        kept = min(whole / self._counted * (1.0 - self._unread_seconds / self._seconds), 1.0)
        drafted = self._drafted_seconds / self._seconds
        self._kept[bucket] *= OLDER_PLAIN * (OLDER / OLDER_PLAIN) ** drafted
        self._kept[bucket] += drafted, drafted * kept

    def state_dict(self) -> dict[str, Any]:
        """What was learnt from rollouts that have ended, as plain data for JSON."""
        return {"kept": self._kept.tolist(), "shares": self._shares.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kept[:], self._shares[:] = state["kept"], state["shares"]


@compiled
def plain_steps(lengths: Ints, slots: int) -> tuple[Ints, Ints]:
    """The batch sizes of the plain steps that samples of these lengths take, and of each the number of steps.

    Args:
        lengths: in the order in which the samples come; each takes a slot as soon as one is free.
    """
    starts, ends, free = np.zeros_like(lengths), lengths.copy(), np.zeros(slots, np.int64)
    for sample in range(len(lengths)):
        slot = free.argmin()
        starts[sample] = free[slot]
        free[slot] = ends[sample] = free[slot] + lengths[sample]
    starts, ends = np.sort(starts), np.sort(ends)
    sizes, steps = np.zeros(2 * len(lengths), np.int64), np.zeros(2 * len(lengths), np.int64)
    found = begun = now = 0
    for ended in range(len(ends)):
        while begun < len(starts) and starts[begun] < ends[ended]:
            if starts[begun] > now:
                sizes[found], steps[found] = begun - ended, starts[begun] - now
                found, now = found + 1, starts[begun]
            begun += 1
        if ends[ended] > now:
            sizes[found], steps[found] = begun - ended, ends[ended] - now
            found, now = found + 1, ends[ended]
    return sizes[:found], steps[:found]
