"""The adaptive drafting policy: each step the tree that promises most tokens per second."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel
from rlhfspec_mega.planning.forecast import Forecast
from rlhfspec_mega.planning.policy import NONE, CalibratedPolicy, StepView, drafted_nodes, ranked
from rlhfspec_mega.planning.tree import Batch, DraftTree, Floats, Ints, StepRecord

RETHINK = 16  # steps after which forecasts, and whether drafting pays, are worked out anew
PROBE_SHARE = 0.01  # of the time may go into finding out whether drafting pays again
PROBE_LATEST = 1000  # plain steps after which that is found out whatever it costs


class Best(NamedTuple):
    """The best number of draft tokens among the candidates, and its rate in (weighted) tokens per second."""

    nodes: int
    rate: float


class Adaptive(CalibratedPolicy):
    """Maximises, over the draft tokens of the whole batch,

        sum_i w_i (1 + survival kept of sample i) / (draft seconds + verify seconds of B + n tokens).

    Survival falls along a path, so for each total n the best tree is the n nodes of largest weight x survival in the
    whole batch; every n is tried, because the cost has steps. RLHFSpec (arXiv 2512.04752) takes one n for all samples;
    here each sample gets its own. Layers are drafted while the next one is predicted to raise the best rate, from the
    nodes whose children are predicted to be kept.
    """

    def __init__(
        self,
        acceptance: AcceptanceModel,
        cost: CostModel,
        width: int = 4,
        max_depth: int = 8,
        max_nodes: int = 32,
        tail_weight: float = 0.0,
    ) -> None:
        """`tail_weight` t weighs a sample by (response tokens + 1) ** t: above 0, long ones are helped."""
        super().__init__(acceptance, cost, width, max_depth, max_nodes)
        self.tail_weight = tail_weight
        self._forecast = Forecast(acceptance, width, max_depth)
        self._steps = 0
        self._plain_steps = 0
        self._probing = False
        self._pays: dict[tuple[int, int], bool] = {}  # by batch size and usable depth, for the next few steps

    def depth(self, batch: Batch) -> int:
        """All usable layers if some depth is forecast to pay (`expand` ends it sooner), else 0, or 1 for a probe."""
        usable = self._usable_depth(batch, self.max_depth)
        self._probing = False
        if usable == 0:
            return 0
        plain = float(self._step(batch).verify_seconds(1)[0])
        key = batch.size, usable
        if key not in self._pays:
            self._pays[key] = self._forecast_rate(batch, usable) > batch.size / plain
        if self._pays[key]:
            return usable
        self._probing = self._probe_is_due(batch, plain)
        return int(self._probing)

    def expand(self, batch: Batch, tree: DraftTree) -> Ints:
        """Nodes of the last layer whose children are predicted to be kept, if they raise the best rate."""
        self._fill_survival(batch, tree)
        parents = self._may_be_parents(batch, tree)
        if self._probing or not len(parents):
            return NONE
        values = self._values(batch, tree)
        kept = values[ranked(tree, values, self.max_nodes)]
        drafted = drafted_nodes(tree)
        # Nothing kept is no rival here: whether to draft at all was decided with all layers in view.
        step = self._step(batch)
        now = self._best(step, kept, step.draft_seconds(tree.depth, drafted), least=1)
        children = self._expected_children(batch, tree, values, parents)
        together = np.concatenate((kept, children.ravel()))
        together[::-1].sort()
        seconds = step.draft_seconds(tree.depth + 1, drafted + len(parents))
        then = self._best(step, together, seconds, least=1)
        worth = parents[children[:, 0] >= together[then.nodes - 1]]
        if len(worth) < len(parents):  # the others need not be drafted from either
            seconds = step.draft_seconds(tree.depth + 1, drafted + len(worth))
            then = self._best(step, together, seconds, least=1)
        return worth if len(worth) and then.rate > now.rate else NONE

    def choose(self, batch: Batch, tree: DraftTree) -> Ints:
        """The nodes of the best rate, drafting already paid for; a probe verifies about one per sample at least."""
        values = self._values(batch, tree)
        order = ranked(tree, values, self.max_nodes)
        step = self._step(batch)
        seconds = step.draft_seconds(tree.depth, drafted_nodes(tree))
        least = step.size if self._probing else 0
        return np.sort(order[: self._best(step, values[order], seconds, least).nodes])

    def observe(self, record: StepRecord) -> None:
        super().observe(record)
        self._steps += 1
        if self._probing or self._steps % RETHINK == 0:  # a probe is there to be heeded at once
            self._forecast.renew()
            self._pays.clear()
        self._plain_steps = 0 if record.tree.depth else self._plain_steps + 1

    def _values(self, batch: Batch, tree: DraftTree) -> Floats:
        """Weight x survival of all nodes; weights average 1 over the batch."""
        if self.tail_weight == 0.0:
            return tree.survival
        weights = (batch.generated + 1.0) ** self.tail_weight
        return tree.survival * (weights / weights.mean())[tree.rows]

    def _expected_children(self, batch: Batch, tree: DraftTree, values: Floats, parents: Ints) -> Floats:
        """Values [parents, width] of children not drafted yet, best first."""
        shared = self._step(batch).temperature
        if shared is not None:
            return values[parents, None] * self.acceptance.expected_layer(tree.depth + 1, shared)[: self.width]
        temperatures = np.unique(batch.temperatures)
        layers = [self.acceptance.expected_layer(tree.depth + 1, float(t))[: self.width] for t in temperatures]
        which = np.searchsorted(temperatures, batch.temperatures[tree.rows[parents]])
        return values[parents, None] * np.array(layers)[which]

    def _best(self, step: StepView, values: Floats, draft_seconds: float, least: int) -> Best:
        """The best n >= least for nodes of these values, best first; of equal rates the smallest n."""
        tokens = np.empty(len(values) + 1)
        tokens[0] = step.size
        tokens[1:] = values
        tokens.cumsum(out=tokens)
        rates = tokens / (draft_seconds + step.verify_seconds(len(tokens)))
        least = min(least, len(values))
        count = int(rates[least:].argmax()) + least
        return Best(count, float(rates[count]))

    def _forecast_rate(self, batch: Batch, usable: int) -> float:
        """The best tokens per second over all depths and survival thresholds, for samples as they were lately."""
        expected = self._forecast.of(batch)
        size, kv = batch.size, batch.kv_tokens
        nodes = expected.nodes[:usable]
        depths = np.arange(1.0, usable + 1)[:, None]
        seconds = self.cost.draft_seconds(size, kv, batch.backlog, depths, size * expected.drafted[:usable])
        seconds = seconds + self.cost.verify_seconds(size, kv, size * (1.0 + nodes))
        rates = size * (1.0 + expected.accepted[:usable]) / seconds
        return float(np.where(nodes <= self.max_nodes, rates, 0.0).max())

    def _probe_is_due(self, batch: Batch, plain: float) -> bool:
        """Whether the time a probe would lose is within its share of the plain steps since the last draft."""
        if self._plain_steps >= PROBE_LATEST:
            return True
        chances = self.acceptance.expected_layer(1, float(batch.temperatures.max()))
        seconds = self._step(batch).draft_seconds(1, 0)
        seconds += float(self.cost.verify_seconds(batch.size, batch.kv_tokens, 2 * batch.size))
        lost = seconds - plain * (1.0 + float(chances[0]))
        return lost <= PROBE_SHARE * plain * self._plain_steps
