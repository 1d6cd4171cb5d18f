"""Drafting policies that give every sample the same number of draft tokens."""

from __future__ import annotations

import numpy as np

from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel
from rlhfspec_mega.planning.payoff import Payoff
from rlhfspec_mega.planning.policy import CalibratedPolicy, drafted_nodes, places, ranked
from rlhfspec_mega.planning.tree import Batch, DraftTree, Ints, StepRecord


class Fixed(CalibratedPolicy):
    """Always the `max_nodes` best nodes of each sample, from trees of one depth.

    As EAGLE-2 (arXiv 2406.16858) at most `width` nodes of each sample and layer are drafted from; of those only such as
    are among the sample's best so far, since no child of another could be kept.
    """

    learns_cost = False

    def __init__(self, acceptance: AcceptanceModel, cost: CostModel, width: int, depth: int, max_nodes: int) -> None:
        super().__init__(acceptance, cost, width, depth, max_nodes)

    def depth(self, batch: Batch) -> int:
        return self._usable_depth(batch, self.max_depth)

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
        self._payoff = Payoff(acceptance, cost, width, depth, max_nodes, whole=True)

    def depth(self, batch: Batch) -> int:
        if self._payoff.holds(batch):
            return 0
        return self._payoff.depth(self._step(batch), super().depth(batch))

    def observe(self, record: StepRecord) -> None:
        super().observe(record)
        self._payoff.observe(record)

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
        best = max(int(rates.argmax()), int(self._payoff.probing))
        return np.sort(order[place < best])
