"""What a worker learns from its engine's decode steps: plain decode speed, and how long samples usually are."""

from __future__ import annotations

from collections.abc import Sequence

from rlhfspec_mega.planning.cost import CostModel, StepCost
from rlhfspec_mega.planning.rollout_state import Throughput
from rlhfspec_mega.planning.throughput import throughput_of
from rlhfspec_mega.types import Span

KEPT = 0.5  # weight that lengths of earlier rollouts keep at each new rollout


class PlainDecodingCost:
    """Cost model of plain decode steps, learnt from every step because a short profile alone is noisy.

    Args:
        profile: measured steps; may be empty.
    """

    def __init__(self, profile: Sequence[StepCost]) -> None:
        self._cost = CostModel()
        if profile:
            self._cost.fit(profile)

    def learn(self, steps: Span) -> None:
        """Learn from the decode steps of one batch, see `TorchEngine.spans`."""
        count, batch = int(steps.arguments["steps"]), int(steps.arguments["batch"])
        kv_tokens = int(steps.arguments["kv_tokens"]) // count
        self._cost.observe(StepCost(batch, kv_tokens, batch, 0, 0, 0, 0.0, steps.seconds / count))

    def throughput(self, slots: int, length: int) -> Throughput:
        """Predicted throughput for samples of this many tokens."""
        return throughput_of(self._cost, None, slots=slots, length=length)


class MeanSampleLength:
    """Running mean length in tokens of the samples that an engine decodes, weighted by decode steps.

    Args:
        first: the length before anything was learnt.
    """

    def __init__(self, first: int) -> None:
        self._first = first
        self._kv_read = self._sample_steps = 0.0

    def learn(self, decoding: Sequence[Span]) -> None:
        """From decode steps, see `TorchEngine.spans`."""
        for span in decoding:
            self._kv_read += int(span.arguments["kv_tokens"])
            self._sample_steps += int(span.arguments["batch"]) * int(span.arguments["steps"])

    def take(self) -> int:
        """The usual length for the next rollout; lengths learnt after this call count for more."""
        if not self._sample_steps:
            return self._first
        length = max(1, round(self._kv_read / self._sample_steps))
        self._kv_read, self._sample_steps = KEPT * self._kv_read, KEPT * self._sample_steps
        return length
