"""What all drafting policies share: survival and cost from calibrated models, which steps train."""

from __future__ import annotations

import numpy as np

from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel, step_cost
from rlhfspec_mega.planning.tree import Batch, DraftTree, Floats, Ints, StepRecord

# Steps that costs are learnt from: all of the first ones, then every fourth with and every fourth without a draft, of
# plain ones only such as follow others.
COSTS_AT_FIRST, COSTS_EVERY = 32, 4
# Plain steps in a row after which the next one's cost is that of a plain step: the first ones after drafting take
# longer (see `control.LENGTH`), and to take them for the usual would let drafting look better than it is.
SETTLING = 3

NONE = np.zeros(0, np.int64)
NONE.flags.writeable = False


class StepView:
    """What a policy asks of a batch again and again within a step."""

    def __init__(self, batch: Batch, cost: CostModel) -> None:
        self.batch = batch
        self.size = batch.size
        self.kv_tokens = batch.kv_tokens
        self.least_remaining = int(batch.remaining.min())
        first = float(batch.temperatures[0])
        self.temperature = first if (batch.temperatures == first).all() else None  # of all samples, if they share it
        self._cost = cost
        self._verify = np.zeros(0)

    def verify_seconds(self, count: int) -> Floats:
        """Seconds of verifying 0, 1, .. count - 1 draft tokens."""
        if len(self._verify) < count:
            tokens = np.arange(self.size, self.size + 2 * count, dtype=np.float64)
            self._verify = self._cost.verify_seconds(self.size, self.kv_tokens, tokens)
        return self._verify[:count]

    def draft_seconds(self, depth: int, drafted: int) -> float:
        """Seconds of drafting so many layers, with so many nodes after the first pass."""
        return self._cost.drafting(self.size, self.kv_tokens, self.batch.backlog, depth, drafted)


class CalibratedPolicy:
    """Base of the policies: implements `observe` of the `DraftingPolicy` protocol and the steps of the others.

    Attributes:
        acceptance, cost: may be shared by several policies.
        learns_acceptance, learns_cost: whether `observe` trains them: learning takes time, and not all policies read
            both.
    """

    learns_acceptance = True
    learns_cost = True

    def __init__(
        self, acceptance: AcceptanceModel, cost: CostModel, width: int, max_depth: int, max_nodes: int
    ) -> None:
        self.acceptance = acceptance
        self.cost = cost
        self.width = width
        self.max_depth = max_depth
        self.max_nodes = max_nodes
        self._view: StepView | None = None
        self._steps = 0
        self._learnt = [-COSTS_EVERY, -COSTS_EVERY]  # when costs of a plain step were, and of one with a draft
        self._plain = 0  # plain steps in a row

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
