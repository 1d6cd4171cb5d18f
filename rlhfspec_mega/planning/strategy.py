"""Drafting policies: which draft tokens of a step are verified, from calibrated models of acceptance and cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlhfspec_mega.config.schema.generation import SpeculationConfig
from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel, step_cost
from rlhfspec_mega.planning.payoff import Payoff, StepView
from rlhfspec_mega.planning.tree import Batch, DraftingPolicy, DraftTree, Floats, Ints, StepRecord

# Steps that costs are learnt from: all of the first ones, then every fourth with and every fourth without a draft, of
# plain ones only such as follow others.
COSTS_AT_FIRST, COSTS_EVERY = 32, 4
# Plain steps in a row after which the next one's cost is that of a plain step: the first ones after drafting take
# longer (see `oversight.CONTROL_STEPS`), and to take them for the usual would let drafting look better than it is.
SETTLING = 3

NONE = np.zeros(0, np.int64)
NONE.flags.writeable = False


class CalibratedPolicy:
    """Base of the policies: implements `depth` and `observe` of the `DraftingPolicy` protocol and steps of the others.

    Attributes:
        acceptance, cost: may be shared by several policies.
        payoff: what decides whether to draft at all; None: always.
        learns_acceptance, learns_cost: whether `observe` trains them: learning takes time, and not all policies read
            both.
    """

    learns_acceptance = learns_cost = True
    payoff: Payoff | None = None

    def __init__(
        self, acceptance: AcceptanceModel, cost: CostModel, width: int, max_depth: int, max_nodes: int
    ) -> None:
        self.acceptance, self.cost = acceptance, cost
        self.width, self.max_depth, self.max_nodes = width, max_depth, max_nodes
        self._view: StepView | None = None
        self._steps = 0
        self._learnt = [-COSTS_EVERY, -COSTS_EVERY]  # when costs of a plain step were, and of one with a draft
        self._plain = 0  # plain steps in a row

    def depth(self, batch: Batch) -> int:
        """All usable layers if drafting pays (`expand` may end it sooner), else 0, or 1 for a probe."""
        if self.payoff is None:
            return self._usable_depth(batch, self.max_depth)
        if self.payoff.holds(batch):
            return 0
        return self.payoff.depth(self._step(batch), self._usable_depth(batch, self.max_depth))

    def observe(self, record: StepRecord) -> None:
        """Learn from a step, plain ones too."""
        self._view = None  # costs change
        self._steps += 1
        if self.learns_acceptance:
            self.acceptance.observe(record)
        kind = int(record.tree.depth > 0)
        settled = kind == 1 or self._plain >= SETTLING
        self._plain = 0 if kind else self._plain + 1
        due = self._steps <= COSTS_AT_FIRST or self._steps - self._learnt[kind] >= COSTS_EVERY
        if self.learns_cost and settled and due:
            self._learnt[kind] = self._steps
            self.cost.observe(step_cost(record))
        if self.payoff:
            self.payoff.observe(record)

    def _usable_depth(self, batch: Batch, limit: int) -> int:
        """At most `limit` layers, and no more than any sample of the batch can use."""
        return max(0, min(limit, int(batch.remaining.max()) - 1))

    def _step(self, batch: Batch) -> StepView:
        """The view of this batch, made once between two observations."""
        if self._view is None or self._view.batch is not batch:
            self._view = StepView(batch, self.cost)
        return self._view

    def _fill_survival(self, batch: Batch, tree: DraftTree) -> None:
        """Survival of the last layer: the parent's times the conditional probability; 0 for what cannot be used."""
        last = tree.last_layer
        survival = self.acceptance.conditional(batch, tree, last)
        if tree.depth > 1:
            survival *= tree.survival[tree.parents[last]]
        if tree.depth >= self._step(batch).least_remaining:
            survival[tree.depth >= batch.remaining[tree.rows[last]]] = 0.0
        tree.survival[last] = survival

    def _may_be_parents(self, batch: Batch, tree: DraftTree) -> Ints:
        """Nodes of the last layer whose children could be used."""
        if tree.depth >= self.max_depth:
            return NONE
        last = tree.last_layer
        useful = ~tree.ends[last]
        if tree.depth >= self._step(batch).least_remaining - 1:
            useful &= tree.depth < batch.remaining[tree.rows[last]] - 1
        return useful.nonzero()[0] + last.start


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
        self.payoff: Payoff = Payoff(acceptance, cost, width, max_depth, max_nodes, whole=False)

    def expand(self, batch: Batch, tree: DraftTree) -> Ints:
        """Nodes of the last layer whose children are predicted to be kept, if they raise the best rate."""
        self._fill_survival(batch, tree)
        parents = self._may_be_parents(batch, tree)
        if self.payoff.probing or not len(parents):
            return NONE
        values = self._values(batch, tree)
        kept = values[ranked(tree, values, self.max_nodes)]
        drafted = drafted_nodes(tree)
        # Nothing kept is no rival here: whether to draft at all was decided with all layers in view.
        step = self._step(batch)
        _, rate_now = self._best(step, kept, step.draft_seconds(tree.depth, drafted), least=1)
        children = self._expected_children(batch, tree, values, parents)
        together = np.concatenate((kept, children.ravel()))
        together[::-1].sort()
        seconds = step.draft_seconds(tree.depth + 1, drafted + len(parents))
        count, rate_then = self._best(step, together, seconds, least=1)
        worth = parents[children[:, 0] >= together[count - 1]]
        if len(worth) < len(parents):  # the others need not be drafted from either
            seconds = step.draft_seconds(tree.depth + 1, drafted + len(worth))
            _, rate_then = self._best(step, together, seconds, least=1)
        return worth if len(worth) and rate_then > rate_now else NONE

    def choose(self, batch: Batch, tree: DraftTree) -> Ints:
        """The nodes of the best rate, drafting already paid for; a probe verifies about one per sample at least."""
        values = self._values(batch, tree)
        order = ranked(tree, values, self.max_nodes)
        step = self._step(batch)
        seconds = step.draft_seconds(tree.depth, drafted_nodes(tree))
        least = step.size if self.payoff.probing else 0
        count, _ = self._best(step, values[order], seconds, least)
        return np.sort(order[:count])

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

    def _best(self, step: StepView, values: Floats, draft_seconds: float, least: int) -> tuple[int, float]:
        """The best n >= least for nodes of these values, best first, and its rate; of equal rates the smallest n."""
        tokens = np.empty(len(values) + 1)
        tokens[0] = step.size
        tokens[1:] = values
        tokens.cumsum(out=tokens)
        rates = tokens / (draft_seconds + step.verify_seconds(len(tokens)))
        least = min(least, len(values))
        count = int(rates[least:].argmax()) + least
        return count, float(rates[count])


class Fixed(CalibratedPolicy):
    """Always the `max_nodes` best nodes of each sample, from trees of one depth.

    As EAGLE-2 (arXiv 2406.16858) at most `width` nodes of each sample and layer are drafted from; of those only such as
    are among the sample's best so far, since no child of another could be kept.
    """

    learns_cost = False

    def expand(self, batch: Batch, tree: DraftTree) -> Ints:
        self._fill_survival(batch, tree)
        kept = np.zeros(tree.size, np.bool_)
        kept[ranked(tree, tree.survival, self.max_nodes)] = True
        parents = self._may_be_parents(batch, tree)
        parents = parents[kept[parents]]
        parents = parents[np.argsort(-tree.survival[parents], kind="stable")]
        return np.sort(parents[places(tree.rows[parents]) < self.width])

    def choose(self, batch: Batch, tree: DraftTree) -> Ints:
        return np.sort(ranked(tree, tree.survival, self.max_nodes))


class Uniform(Fixed):
    """RLHFSpec's rule (arXiv 2512.04752): one n for all samples, each step the one of the best predicted rate.

    That n may be 0, so nothing is drafted where drafting all layers is forecast not to pay.
    """

    learns_cost = True

    def __init__(self, acceptance: AcceptanceModel, cost: CostModel, width: int, depth: int, max_nodes: int) -> None:
        super().__init__(acceptance, cost, width, depth, max_nodes)
        self.payoff: Payoff = Payoff(acceptance, cost, width, depth, max_nodes, whole=True)

    def choose(self, batch: Batch, tree: DraftTree) -> Ints:
        order = ranked(tree, tree.survival, self.max_nodes)
        place = places(tree.rows[order])
        most = int(place.max()) + 1 if len(order) else 0
        # Entry n: nodes, and survival, of the n best of every sample.
        nodes = np.concatenate(([0], np.bincount(place, minlength=most).cumsum()))
        accepted = np.concatenate(([0.0], np.bincount(place, tree.survival[order], most).cumsum()))
        size, kv = batch.size, batch.kv_tokens
        seconds = self.cost.draft_seconds(size, kv, batch.backlog, tree.depth, drafted_nodes(tree))
        rates = (size + accepted) / (seconds + self.cost.verify_seconds(size, kv, size + nodes.astype(np.float64)))
        best = max(int(rates.argmax()), int(self.payoff.probing))
        return np.sort(order[place < best])


def make_policy(config: SpeculationConfig, acceptance: AcceptanceModel, cost: CostModel) -> DraftingPolicy | None:
    """The policy of one engine; None for plain decoding without a draft."""
    return None if config.policy == "off" else POLICIES[config.policy](config, acceptance, cost)


def _adaptive(config: SpeculationConfig, *models: Any) -> DraftingPolicy:
    return Adaptive(*models, config.topk, config.max_num_steps, config.max_num_draft_tokens, config.tail_weight)


def _uniform(config: SpeculationConfig, *models: Any) -> DraftingPolicy:
    return Uniform(*models, config.topk, config.num_steps, config.max_num_draft_tokens)


def _fixed(config: SpeculationConfig, *models: Any) -> DraftingPolicy:
    return Fixed(*models, config.topk, config.num_steps, config.num_draft_tokens)


# Choices of speculation.policy beside "off": of the options, the model of acceptance and the model of cost.
POLICIES: dict[str, Callable[[SpeculationConfig, AcceptanceModel, CostModel], DraftingPolicy]] = {
    "adaptive": _adaptive,
    "uniform": _uniform,
    "fixed": _fixed,
}


def drafted_nodes(tree: DraftTree) -> int:
    """Nodes that have children: those that the draft was run on after its first pass."""
    if tree.depth < 2:
        return 0
    return int(np.count_nonzero(np.bincount(tree.parents[tree.layers[1] :])))


def ranked(tree: DraftTree, values: Floats, most_per_sample: int) -> Ints:
    """Nodes of positive value, best first, parents before children, at most so many of one sample.

    None that ends its sample: where it would be accepted, the target's choice after its parent ends the sample too.
    Every prefix is closed under parents: a child is worth no more than its parent, and of equals the first comes first.
    """
    if tree.ends.any():
        values = np.where(tree.ends, 0.0, values)
    order = (-values).argsort(kind="stable")
    if len(order) and values[order[-1]] <= 0.0:
        order = order[: np.count_nonzero(values > 0.0)]
    if len(order) > most_per_sample:
        order = order[places(tree.rows[order]) < most_per_sample]
    return order


def places(rows: Ints) -> Ints:
    """For each entry, how many earlier ones have its row: [0, 1, 0, 2] for rows [a, a, b, a]."""
    by_row = np.argsort(rows, kind="stable")
    grouped = rows[by_row]
    result = np.empty(len(rows), np.int64)
    result[by_row] = np.arange(len(rows)) - np.searchsorted(grouped, grouped)
    return result
