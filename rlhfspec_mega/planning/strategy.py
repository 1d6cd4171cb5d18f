"""Drafting policies: which draft tokens of a step are verified, by calibrated models of acceptance and cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rlhfspec_mega.config.schema.generation import SpeculationConfig
from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel, StepCost, step_cost
from rlhfspec_mega.planning.forecast import StepView, recalled_rate
from rlhfspec_mega.planning.growth import least_to_pay, most_worth_nodes, worth_children
from rlhfspec_mega.planning.modes import DRAFTED, PLAIN, RECALLED, SETTLING, ModeChoice
from rlhfspec_mega.planning.nodes import index_within_row, possible_parents, rank_nodes
from rlhfspec_mega.planning.tree import (
    Batch,
    DraftingPolicy,
    DraftTree,
    Floats,
    Ints,
    Prices,
    Recall,
    StepRecord,
    Worth,
)

# Step times are learnt from all of the first steps, then from every eighth step with and every eighth without a draft,
# and from those in which a trial verifies more than is worth it.
COSTS_AT_FIRST, COSTS_EVERY = 32, 8
COSTS_AT_REST = 128  # steps between two plain steps that are learnt from while nothing is asked

# Earlier text is asked for nodes of at least this survival, and where tokens are dear for those of RECALL_ALSO times
# the mean survival with which they pay: others may make up for them.
LEAST_RECALLED, RECALL_ALSO = 0.04, 0.7

NO_NODES = np.zeros(0, np.int64)
NO_NODES.flags.writeable = False


class CalibratedPolicy(DraftingPolicy):
    """Base of the policies: `depth` and `observe` of the `DraftingPolicy` protocol, and parts of the other methods.

    Attributes:
        acceptance, cost: may be shared by several policies.
        modes: chooses how to make each step; None: always draft.
        learns_acceptance, learns_cost: whether `observe` trains these models. Learning takes time, and some policies do
            not read both.
    """

    learns_acceptance = learns_cost = True
    modes: ModeChoice | None = None
    recalls = False  # whether earlier text is asked for drafts

    def __init__(
        self, acceptance: AcceptanceModel, cost: CostModel, width: int, max_depth: int, max_nodes: int
    ) -> None:
        self.acceptance, self.cost = acceptance, cost
        self.width, self.max_depth, self.max_nodes = width, max_depth, max_nodes
        self._view: StepView | None = None
        self._steps = 0
        self._last_learnt = [-COSTS_EVERY, -COSTS_EVERY]  # steps at which a plain step and a drafted step were learnt
        self._plain_steps = 0  # in a row, up to now
        self._mode: int | None = None  # of this step, once it was chosen
        self._forced = False  # whether a trial verifies more in this step than is worth it

    def follows(self, size: int) -> bool:
        return self.modes is None or self.modes.follows(size)

    def rests(self, size: int, able: bool) -> int:
        return self.modes.rests(size, able) if self.modes else 0

    def rested(self, samples: Ints, kv_tokens: int, seconds: Sequence[float]) -> None:
        """These steps are plain, so there is nothing to learn but what they took."""
        size, settled = len(samples), self._plain_steps >= SETTLING
        self._steps += len(seconds)
        self._plain_steps += len(seconds)
        if self.learns_cost and settled and self._steps - self._last_learnt[0] >= COSTS_AT_REST:
            self._last_learnt[0] = self._steps
            self.cost.observe(StepCost(size, kv_tokens, size, 0, 0, 0, 0.0, seconds[0]))
        if self.modes:
            self.modes.rested(size, kv_tokens, seconds)

    def ended(self, samples: Ints, tokens: Ints, joined: Floats, left: int) -> None:
        if self.modes:
            self.modes.ended(samples, tokens, joined, left)

    def draft_returns(self) -> None:
        if self.modes:
            self.modes.draft_returns()

    def recall(self, batch: Batch) -> Recall | None:
        """Ask for the nodes that may be worth their verification."""
        if not self.recalls or (self.modes and self._chosen_mode(batch) == PLAIN):
            return None
        least = self._least_survival(batch) if self.learns_cost else LEAST_RECALLED
        classes, accepted = self._step(batch).classes, self.acceptance.recalled_table()
        return Recall(self.max_nodes, least, classes, accepted, self._worth(batch))

    def _worth(self, batch: Batch) -> Worth | None:
        """See Recall; None: `choose` is asked."""
        return None

    def _least_survival(self, batch: Batch) -> float:
        """Survival from which a node is asked for: see `least_to_pay`."""
        seconds = self._step(batch).verify_seconds(batch.size * self.max_nodes + 1)
        return max(LEAST_RECALLED, RECALL_ALSO * least_to_pay(seconds, batch.size))

    def depth(self, batch: Batch) -> int:
        """Layers to draft at most: all usable ones where drafting pays, also beside what earlier text promises."""
        usable = self._usable_depth(batch, self.max_depth)
        if self.modes is None:
            return usable
        if self._chosen_mode(batch) != DRAFTED:
            return 0
        if len(batch.recalled) and not self.modes.trying:
            step = self._step(batch)
            plain = step.size / step.plain_seconds
            if recalled_rate(step) > self.modes.gain(step, DRAFTED) * plain:
                return 0
        return usable

    def observe(self, record: StepRecord) -> None:
        """Learn from a step, with or without a draft."""
        if self.modes:
            mode = (DRAFTED if record.tree.depth else PLAIN) if self._mode is None else self._mode
            self.modes.observe(record, mode, self._step(record.batch), self._forced)
        forced = self._forced
        self._forced, self._view, self._mode = False, None, None  # the view caches costs, which change below
        self._steps += 1
        if self.learns_acceptance:
            self.acceptance.observe(record)
        kind = int(record.tree.depth > 0)
        settled = kind == 1 or len(record.chosen) > 0 or self._plain_steps >= SETTLING
        self._plain_steps = 0 if kind or len(record.chosen) else self._plain_steps + 1
        # What is forced was too dear by these costs: nothing else would show that they are wrong.
        due = forced or self._steps <= COSTS_AT_FIRST or self._steps - self._last_learnt[kind] >= COSTS_EVERY
        if self.learns_cost and settled and due:
            self._last_learnt[kind] = self._steps
            self.cost.observe(step_cost(record))

    def _chosen_mode(self, batch: Batch) -> int:
        """The mode of this step, chosen once."""
        assert self.modes is not None
        if self._mode is None:
            usable = self._usable_depth(batch, self.max_depth)
            if usable:
                self._mode = self.modes.choose(self._step(batch), usable if batch.draftable else 0, self.recalls)
            else:  # every sample gets its last token: a choice would be kept for steps of which that is not true
                self._mode = PLAIN
        return self._mode

    def _least(self, count: int) -> int:
        """`count` draft tokens are verified at least in a trial: what is accepted is learnt from what is verified."""
        return count if self.modes and self.modes.trying else 0

    def _usable_depth(self, batch: Batch, limit: int) -> int:
        """`limit`, or fewer layers if no sample of the batch can use so many."""
        return max(0, min(limit, int(batch.remaining.max()) - 1))

    def _step(self, batch: Batch) -> StepView:
        """The cached view of this batch, until the next `observe`."""
        if self._view is None or self._view.batch.samples is not batch.samples:
            self._view = StepView(batch, self.cost)
        self._view.batch = batch  # the same samples, by now perhaps with what earlier text gives
        return self._view

    def _fill_survival(self, batch: Batch, tree: DraftTree) -> None:
        """Set the survival of the last layer."""
        self.acceptance.fill_survival(batch, tree, tree.last_layer.start)

    def _possible_parents(self, batch: Batch, tree: DraftTree) -> Ints:
        """Nodes of the last layer whose children could still be used."""
        if tree.depth >= self.max_depth:
            return NO_NODES
        return possible_parents(tree.rows, tree.ends, batch.remaining, tree.last_layer.start, tree.depth)


class Adaptive(CalibratedPolicy):
    """Chooses the draft tokens of the whole batch for the most predicted tokens per second (see `most_worth`), from

        tokens = sum_i w_i (1 + survival of the nodes kept for sample i),
        seconds = draft seconds + verify seconds of B + n tokens.

    Survival falls along a path, so for each total n the best choice is the n nodes of largest w x survival in the whole
    batch. Every n is tried, because the cost curve has steps. RLHFSpec (arXiv 2512.04752) gives all samples the same
    number of draft tokens; here each sample gets its own. A further layer is drafted only if it is predicted to raise
    the best rate, and only from nodes whose children are predicted to be kept.
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
        """`tail_weight` t gives each sample the weight w = (response tokens + 1) ** t; above 0 favours long samples."""
        super().__init__(acceptance, cost, width, max_depth, max_nodes)
        self.tail_weight = tail_weight
        self.modes: ModeChoice = ModeChoice(acceptance, cost, width, max_depth, max_nodes, fixed_depth=False)
        self._step_prices: Prices | None = None

    def observe(self, record: StepRecord) -> None:
        super().observe(record)
        self._step_prices = None

    def expand(self, batch: Batch, tree: DraftTree) -> Ints:
        """Nodes of the last layer whose children are predicted to be kept, if they are worth their time."""
        self._fill_survival(batch, tree)
        if tree.depth >= self.max_depth:
            return NO_NODES
        step = self._step(batch)
        return worth_children(
            self._prices(step),
            self._values(batch, tree),
            tree.rows,
            tree.ends,
            tree.last_layer.start,
            tree.depth,
            tree.drafted,
            batch.remaining,
            step.classes,
            self.acceptance.expected_layers(),
            self.max_nodes,
            self.width,
        )

    def choose(self, batch: Batch, tree: DraftTree) -> Ints:
        """The nodes that are worth most, given what is drafted; a trial verifies at least as many nodes as samples."""
        if len(batch.recalled):
            self.acceptance.fill_survival(batch, tree, 0)
        prices, values, least = self._prices(self._step(batch)), self._values(batch, tree), self._least(batch.size)
        chosen, self._forced = most_worth_nodes(
            prices, values, tree.rows, tree.ends, tree.depth, tree.drafted, self.max_nodes, least
        )
        return chosen

    def _worth(self, batch: Batch) -> Worth | None:
        if self._mode != RECALLED or self.modes.trying:
            return None
        odds, entries = self.acceptance.of_samples(batch)
        return Worth(odds, entries, batch.remaining, self._weights(batch), self._prices(self._step(batch)))

    def _values(self, batch: Batch, tree: DraftTree) -> Floats:
        """w x survival of all nodes."""
        return tree.survival * self._weights(batch)[tree.rows] if self.tail_weight else tree.survival

    def _weights(self, batch: Batch) -> Floats:
        """w, scaled to average 1 over the batch."""
        if self.tail_weight == 0.0:
            return np.ones(batch.size)
        weights = (batch.generated + 1.0) ** self.tail_weight
        return np.asarray(weights / weights.mean())

    def _prices(self, step: StepView) -> Prices:
        """Of this step."""
        if self._step_prices is None:
            gain = self.modes.measured(step.size, DRAFTED if self._mode is None else self._mode)
            pace, verify = gain * step.size / step.plain_seconds, step.verify_seconds(step.size * self.max_nodes + 1)
            self._step_prices = Prices(float(step.size), pace, verify, *step.draft_prices())
        return self._step_prices


class Fixed(CalibratedPolicy):
    """Always verifies the `max_nodes` best nodes of each sample, from trees of one depth.

    As in EAGLE-2 (arXiv 2406.16858), at most `width` nodes of each sample and layer get children. Only nodes that are
    among the sample's best so far get any, since children of other nodes could not be kept.
    """

    learns_cost = False

    def expand(self, batch: Batch, tree: DraftTree) -> Ints:
        self._fill_survival(batch, tree)
        kept = np.zeros(tree.size, np.bool_)
        kept[rank_nodes(tree, tree.survival, self.max_nodes)] = True
        parents = self._possible_parents(batch, tree)
        parents = parents[kept[parents]]
        parents = parents[np.argsort(-tree.survival[parents], kind="stable")]
        return np.sort(parents[index_within_row(tree.rows[parents]) < self.width])

    def choose(self, batch: Batch, tree: DraftTree) -> Ints:
        if len(batch.recalled):
            self.acceptance.fill_survival(batch, tree, 0)
        return np.sort(rank_nodes(tree, tree.survival, self.max_nodes))


class Uniform(Fixed):
    """RLHFSpec's rule (arXiv 2512.04752): in each step, the n draft tokens per sample of the highest predicted rate.

    All samples get the same n, which may be 0. Nothing is drafted where drafting all layers does not pay.
    """

    learns_cost = True

    def __init__(self, acceptance: AcceptanceModel, cost: CostModel, width: int, depth: int, max_nodes: int) -> None:
        super().__init__(acceptance, cost, width, depth, max_nodes)
        self.modes: ModeChoice = ModeChoice(acceptance, cost, width, depth, max_nodes, fixed_depth=True)

    def choose(self, batch: Batch, tree: DraftTree) -> Ints:
        if len(batch.recalled):
            self.acceptance.fill_survival(batch, tree, 0)
        order = rank_nodes(tree, tree.survival, self.max_nodes)
        place = index_within_row(tree.rows[order])
        most = int(place.max()) + 1 if len(order) else 0
        # Entry n: total number, and total survival, of the n best nodes of every sample.
        nodes = np.concatenate(([0], np.bincount(place, minlength=most).cumsum()))
        accepted = np.concatenate(([0.0], np.bincount(place, tree.survival[order], most).cumsum()))
        size, kv = batch.size, batch.kv_tokens
        seconds = self.cost.draft_seconds(size, kv, batch.backlog, tree.depth, tree.drafted)
        rates = (size + accepted) / (seconds + self.cost.verify_seconds(size, kv, size + nodes.astype(np.float64)))
        best, least = int(rates.argmax()), self._least(1)
        self._forced = best < least
        return np.sort(order[place < max(best, least)])


def make_policy(config: SpeculationConfig, acceptance: AcceptanceModel, cost: CostModel) -> DraftingPolicy | None:
    """The drafting policy of one engine; None for speculation.policy=off, which decodes without a draft."""
    return None if config.policy == "off" else POLICIES[config.policy](config, acceptance, cost)


def _adaptive(config: SpeculationConfig, acceptance: AcceptanceModel, cost: CostModel) -> DraftingPolicy:
    return Adaptive(
        acceptance, cost, config.topk, config.max_num_steps, config.max_num_draft_tokens, config.tail_weight
    )


def _uniform(config: SpeculationConfig, acceptance: AcceptanceModel, cost: CostModel) -> DraftingPolicy:
    return Uniform(acceptance, cost, config.topk, config.num_steps, config.max_num_draft_tokens)


def _fixed(config: SpeculationConfig, acceptance: AcceptanceModel, cost: CostModel) -> DraftingPolicy:
    return Fixed(acceptance, cost, config.topk, config.num_steps, config.num_draft_tokens)


# By value of speculation.policy, "off" aside: how to make the policy from options, acceptance model and cost model.
POLICIES: dict[str, Callable[[SpeculationConfig, AcceptanceModel, CostModel], DraftingPolicy]] = {
    "adaptive": _adaptive,
    "uniform": _uniform,
    "fixed": _fixed,
}
