"""Whether to draft at all: decided before anything is drafted, and found out anew by probes while it does not pay."""

from __future__ import annotations

import numpy as np

from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel
from rlhfspec_mega.planning.forecast import Forecast, Yield
from rlhfspec_mega.planning.policy import StepView
from rlhfspec_mega.planning.tree import Batch, StepRecord

RETHINK = 16  # steps after which forecasts, and whether drafting pays, are worked out anew
HOLD = 8  # plain steps that follow a decision not to draft, while no sample comes or goes: deciding takes time itself
MARGIN = 1.05  # of forecast rates: they are the best of many guesses, and leave out what a policy's own work takes
PAID_OVER = 32  # steps over which reading a backlog is counted
PROBE_SHARE = 0.01  # of the time may go into finding out whether drafting pays again
PROBE_LATEST = 1000  # plain steps after which that is found out whatever it costs


def drafting_rate(expected: Yield, cost: CostModel, batch: Batch, usable: int, max_nodes: int, whole: bool) -> float:
    """The best forecast tokens per second of a batch over depths up to `usable` and survival thresholds.

    Args:
        max_nodes: draft tokens of a sample, at most.
        whole: see `Payoff`.
    """
    size, kv = batch.size, batch.kv_tokens
    layers = slice(usable - 1 if whole else 0, usable)
    nodes = expected.nodes[layers]
    depths = np.arange(layers.start + 1.0, usable + 1)[:, None]
    # What has piled up over plain steps is read once and serves all steps to come.
    backlog = min(batch.backlog, size + batch.backlog // PAID_OVER)
    seconds = cost.draft_seconds(size, kv, backlog, depths, size * expected.drafted[layers])
    seconds = seconds + cost.verify_seconds(size, kv, size * (1.0 + nodes))
    rates = size * (1.0 + expected.accepted[layers]) / seconds
    return float(np.where(nodes <= max_nodes, rates, 0.0).max())


class Payoff:
    """Compares the forecast rate of drafting with that of a plain step.

    Args:
        whole: all usable layers are always drafted; else drafting may end after any.

    Attributes:
        probing: the step of now drafts one layer only to learn.
    """

    def __init__(
        self, acceptance: AcceptanceModel, cost: CostModel, width: int, depth: int, max_nodes: int, whole: bool
    ) -> None:
        self._acceptance, self._cost = acceptance, cost
        self._max_nodes, self._whole = max_nodes, whole
        self._forecast = Forecast(acceptance, width, depth)
        self._steps = 0
        self._plain_steps = 0
        self._held_size, self._held_until = 0, 0
        self.probing = False
        self._pays: dict[tuple[int, int], bool] = {}  # by batch size and usable depth, for the next few steps

    def holds(self, batch: Batch) -> bool:
        """Whether a decision not to draft still stands."""
        return batch.size == self._held_size and self._steps < self._held_until

    def depth(self, step: StepView, usable: int) -> int:
        """All usable layers if drafting is forecast to pay, else 0, or 1 for a probe."""
        self.probing = False
        if usable == 0:
            return 0
        plain = float(step.verify_seconds(1)[0])
        key = step.size, usable
        if key not in self._pays:
            expected = self._forecast.of(step.batch)
            rate = drafting_rate(expected, self._cost, step.batch, usable, self._max_nodes, self._whole)
            self._pays[key] = rate > MARGIN * step.size / plain
        if self._pays[key]:
            return usable
        self.probing = self._probe_is_due(step, plain)
        if not self.probing:
            self._held_size, self._held_until = step.size, self._steps + HOLD
        return int(self.probing)

    def observe(self, record: StepRecord) -> None:
        """After a step, and after the models learnt from it."""
        self._steps += 1
        if self.probing or self._steps % RETHINK == 0:  # a probe is there to be heeded at once
            self._forecast.renew()
            self._pays.clear()
        self.probing = False
        self._plain_steps = 0 if record.tree.depth else self._plain_steps + 1

    def _probe_is_due(self, step: StepView, plain: float) -> bool:
        """Whether the time a probe would lose is within its share of the plain steps since the last draft."""
        if self._plain_steps >= PROBE_LATEST:
            return True
        chances = self._acceptance.expected_layer(1, float(step.batch.temperatures.max()))
        seconds = step.draft_seconds(1, 0)
        seconds += float(self._cost.verify_seconds(step.size, step.kv_tokens, 2 * step.size))
        lost = seconds - plain * (1.0 + float(chances[0])) / MARGIN
        return lost <= PROBE_SHARE * plain * self._plain_steps
