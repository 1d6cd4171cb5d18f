"""What whole rollouts keep of the gains of their decode steps, and at which batch sizes their time is spent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rlhfspec_mega.compiled import compiled
from rlhfspec_mega.planning.cost import CostModel
from rlhfspec_mega.planning.tree import Floats, Ints
from rlhfspec_mega.types import BATCH_BUCKETS, batch_bucket

# Before the first rollout all of the gain is taken to be kept; this counts as so many rollouts.
PRIOR_ROLLOUTS = 0.5
OLDER = 0.8  # weight of earlier rollouts after one in which all steps had draft tokens
OLDER_PLAIN = 0.99  # after any other: what was found is tried again some time
NEWEST = 0.3  # weight of the newest rollout in the shares of batch sizes
MOST_SAMPLES = 16384  # of a rollout; there is nothing to learn from longer ones, in which batches stay large


class WholeRollouts:
    """The share of the gains of single steps that whole rollouts keep, by bucket of their largest batch.

    The gain of a step compares it with a plain step of the same batch. But samples that plain steps would end together
    end one after the other with drafts, in steps with few samples, whose tokens take longer than those of large
    batches; and the draft reads prompts, which counts for no step. So whenever no sample is left,

        kept = (1 - (counted - plain) / counted of drafted steps) * (1 - reading / seconds of drafted steps)

    with the seconds of plain steps that the tokens of each step were counted with, of the batches that there were; the
    seconds of the plain steps that the same samples would have taken; and those in which the draft read what plain
    steps had left unread. Where lengths differ much, as they do in most rollouts, this is nearly 1; it is least for
    samples that all have the same length.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._kept = np.zeros((BATCH_BUCKETS, 2))  # decayed sums over rollouts: their weight, and that times `kept`
        self._shares = np.zeros((BATCH_BUCKETS, BATCH_BUCKETS))  # see `shares`
        self._begin()

    def _begin(self) -> None:
        self._ended: dict[int, tuple[int, float]] = {}  # by number, samples that have ended: tokens, and when they came
        self._endless = False  # samples come all the time, and too many have ended to know them all
        self._largest, self._samples, self._kv_tokens = 0, 0, 0  # batch; sums over steps
        self._seconds = self._drafted_seconds = self._reading = 0.0
        # By batch size, plain steps of it with as many tokens as all steps of it, and as those with draft tokens.
        self._counted, self._drafted_counted = dict[int, float](), dict[int, float]()

    def kept(self, size: int) -> float:
        """The share that a rollout keeps which has or had a batch of this size."""
        weight, share = self._kept[batch_bucket(max(size, self._largest))].tolist()
        return (PRIOR_ROLLOUTS + share) / (PRIOR_ROLLOUTS + weight)

    def shares(self, size: int) -> Floats:
        """Shares [BATCH_BUCKETS] of the time at each batch size, in plain steps of a rollout that has or had a batch of
        this size; all 0 before the first one has ended."""
        return self._shares[batch_bucket(max(size, self._largest))]

    def had(self, size: int) -> None:
        """There was a batch of this size, whose steps may be added later."""
        self._largest = max(self._largest, size)

    def add_step(
        self, size: int, kv_tokens: int, tokens: float, seconds: float, reading: float, drafted: bool, steps: int = 1
    ) -> None:
        """Add a step, or several of the same batch size.

        Args:
            tokens: of a sample, in the mean: plain steps that give as many.
            seconds, reading: what it took, and how much of that for reading what plain steps had left unread.
            drafted: whether draft tokens were asked for.
        """
        self.had(size)
        self._samples += size * steps
        self._kv_tokens += kv_tokens * steps
        self._counted[size] = self._counted.get(size, 0.0) + tokens
        self._seconds += seconds
        self._reading += reading
        if drafted:
            self._drafted_counted[size] = self._drafted_counted.get(size, 0.0) + tokens
            self._drafted_seconds += seconds

    def ended(self, samples: Ints, tokens: Ints, joined: Floats, left: int) -> None:
        """Samples have ended, or left the engine.

        Args:
            samples, tokens: of each its number, which rises in the order in which they came, and the response tokens
                that it got here.
            joined: of each, how many tokens of a sample the engine had decoded in the mean when it came.
            left: samples that are still here.
        """
        known = zip(tokens.tolist(), joined.tolist(), strict=True)
        self._ended.update(zip(samples.tolist(), known, strict=True))
        if len(self._ended) > MOST_SAMPLES:
            self._ended.clear()
            self._endless = True
        if left == 0:
            if self._counted and not self._endless:
                self._settle()
            self._begin()

    def _settle(self) -> None:
        """Learn from a rollout that has ended."""
        lengths, joined = np.array([self._ended[number] for number in sorted(self._ended)]).T
        earliest = (joined - joined.min()).astype(np.int64)
        sizes, steps = plain_steps(lengths.astype(np.int64), earliest, self._largest)
        plain = self._seconds_of(zip(sizes.tolist(), steps.tolist(), strict=True))
        whole, bucket = float(plain.sum()), batch_bucket(self._largest)
        if not whole:
            return
        self._learn_shares(bucket, plain / whole)
        drafted, kept = self._drafted_seconds / self._seconds, 1.0
        if drafted:
            counted, of_drafts = (
                float(self._seconds_of(some.items()).sum()) for some in (self._counted, self._drafted_counted)
            )
            kept = max(1.0 - max(counted - whole, 0.0) / of_drafts, 0.0) * (1.0 - self._reading / self._drafted_seconds)
        self._kept[bucket] *= OLDER_PLAIN * (OLDER / OLDER_PLAIN) ** drafted
        self._kept[bucket] += drafted, drafted * kept

    def _learn_shares(self, bucket: int, newest: Floats) -> None:
        """Learn at which batch sizes a rollout's time was spent.

        The more of it was spent at others than in earlier rollouts, the less counts what those kept: lengths are
        distributed otherwise.
        """
        shares = self._shares[bucket]
        if not shares.any():
            shares += newest
            return
        self._kept[bucket] *= 1.0 - 0.5 * np.abs(newest - shares).sum()
        shares += NEWEST * (newest - shares)

    def _seconds_of(self, steps: Iterable[tuple[int, float]]) -> Floats:
        """Seconds [BATCH_BUCKETS] of plain steps, given as batch sizes and numbers of steps."""
        found = np.zeros(BATCH_BUCKETS)
        for size, count in steps:
            kv_tokens = size * self._kv_tokens // self._samples
            found[batch_bucket(size)] += count * self._cost.plain_seconds(size, kv_tokens)
        return found

    def state_dict(self) -> dict[str, Any]:
        """What was learnt from rollouts that have ended, as plain data for JSON."""
        return {"kept": self._kept.tolist(), "shares": self._shares.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kept[:], self._shares[:] = state["kept"], state["shares"]


@compiled
def plain_steps(lengths: Ints, earliest: Ints, slots: int) -> tuple[Ints, Ints]:
    """The batch sizes of the plain steps that samples of these lengths take, and of each the number of steps.

    Args:
        lengths, earliest: in the order in which the samples come, and the steps before each; then it takes a slot as
            soon as one is free.
    """
    starts, ends, free = np.zeros_like(lengths), lengths.copy(), np.zeros(slots, np.int64)
    for sample in range(len(lengths)):
        slot = free.argmin()
        starts[sample] = max(free[slot], earliest[sample])
        free[slot] = ends[sample] = starts[sample] + lengths[sample]
    # Every kind of sorting takes seconds to compile: one is used everywhere.
    starts, ends = starts[np.argsort(starts, kind="mergesort")], ends[np.argsort(ends, kind="mergesort")]
    sizes, steps = np.zeros(2 * len(lengths), np.int64), np.zeros(2 * len(lengths), np.int64)
    found = begun = now = 0
    for ended in range(len(ends)):
        while begun < len(starts) and starts[begun] < ends[ended]:
            if starts[begun] > now:
                if begun > ended:
                    sizes[found], steps[found] = begun - ended, starts[begun] - now
                    found += 1
                now = starts[begun]
            begun += 1
        if ends[ended] > now:
            if begun > ended:
                sizes[found], steps[found] = begun - ended, ends[ended] - now
                found += 1
            now = ends[ended]
    return sizes[:found], steps[:found]
