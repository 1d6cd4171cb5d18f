"""How fast an engine without a draft decodes: measured before its first samples, and learnt from its steps since."""

from __future__ import annotations

from collections.abc import Sequence

from rlhfspec_mega.planning.cost import CostModel, StepCost
from rlhfspec_mega.planning.rollout_state import Throughput
from rlhfspec_mega.planning.throughput import throughput_of
from rlhfspec_mega.types import Span


class PlainPace:
    """A cost model of plain steps. A short profile alone is as noisy as the machine at that moment.

    Args:
        profile: measured steps; may be empty.
    """

    def __init__(self, profile: Sequence[StepCost]) -> None:
        self._cost = CostModel()
        if profile:
            self._cost.fit(profile)

    def learn(self, steps: Span) -> None:
        """From decode steps of one batch, see `TorchEngine.spans`."""
        count, batch = int(steps.arguments["steps"]), int(steps.arguments["batch"])
        kv_tokens = int(steps.arguments["kv_tokens"]) // count
        self._cost.observe(StepCost(batch, kv_tokens, batch, 0, 0, 0, 0.0, steps.seconds / count))

    def throughput(self, slots: int, length: int) -> Throughput:
        """Of samples of so many tokens."""
        return throughput_of(self._cost, None, slots=slots, length=length)
