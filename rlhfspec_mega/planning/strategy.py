"""The adaptive drafting policy: each step the tree that promises most tokens per second."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel
from rlhfspec_mega.planning.payoff import Payoff
from rlhfspec_mega.planning.policy import NONE, CalibratedPolicy, StepView, drafted_nodes, ranked
from rlhfspec_mega.planning.tree import Batch, DraftTree, Floats, Ints, StepRecord


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
        self._payoff = Payoff(acceptance, cost, width, max_depth, max_nodes, whole=False)

    def depth(self, batch: Batch) -> int:
        """All usable layers if some depth is forecast to pay (`expand` ends it sooner), else 0, or 1 for a probe."""
        if self._payoff.holds(batch):
            return 0
        return self._payoff.depth(self._step(batch), self._usable_depth(batch, self.max_depth))

    def expand(self, batch: Batch, tree: DraftTree) -> Ints:
        """Nodes of the last layer whose children are predicted to be kept, if they raise the best rate."""
        self._fill_survival(batch, tree)
        parents = self._may_be_parents(batch, tree)
        if self._payoff.probing or not len(parents):
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
        least = step.size if self._payoff.probing else 0
        return np.sort(order[: self._best(step, values[order], seconds, least).nodes])

    def observe(self, record: StepRecord) -> None:
        super().observe(record)
        self._payoff.observe(record)

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
