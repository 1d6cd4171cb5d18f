"""A drafting policy under oversight: control steps, the watch for a collapse, and counting."""

from __future__ import annotations

import numpy as np

from rlhfspec_mega.planning.control import PlainControl
from rlhfspec_mega.planning.tree import Batch, DraftingPolicy, DraftTree, Ints, StepRecord
from rlhfspec_mega.planning.watch import CollapseWatch
from rlhfspec_mega.types import TALLY_EDGES, DraftingTally


class OverseenPolicy:
    """Implements `DraftingPolicy` by another one, which decides all steps that need not be plain.

    Args:
        stops: whether a collapse stops drafting; without it no decision depends on steps before `begin_anew`.
        temperature: of the samples that are watched for a collapse, as a draft is right more often at lower ones; None:
            of all.
    """

    def __init__(
        self, policy: DraftingPolicy, collapse_ratio: float, stops: bool = True, temperature: float | None = None
    ) -> None:
        self.width, self.max_depth, self.max_nodes = policy.width, policy.max_depth, policy.max_nodes
        self._tally = DraftingTally()
        self.watch, self._temperature = CollapseWatch(collapse_ratio, stops), temperature
        self.begin_anew(policy)

    def begin_anew(self, policy: DraftingPolicy) -> None:
        """Go on with another policy of the same width, depth and nodes; the counts and the watch go on."""
        self.policy = policy
        self._control = PlainControl()

    def depth(self, batch: Batch) -> int:
        control = self._control.is_due()
        return self.policy.depth(batch) if self.watch.may_draft and not control else 0

    def expand(self, batch: Batch, tree: DraftTree) -> Ints:
        return self.policy.expand(batch, tree)

    def choose(self, batch: Batch, tree: DraftTree) -> Ints:
        return self.policy.choose(batch, tree)

    def observe(self, record: StepRecord) -> None:
        self.policy.observe(record)
        self._control.observe(record, self._tally)
        hits = record.root_hits
        if self._temperature is not None and len(hits):
            drafted_for = record.tree.rows[(record.tree.depths == 1) & (record.tree.ranks == 0)]
            hits = hits[record.batch.temperatures[drafted_for] == self._temperature]
        self.watch.count(len(hits), int(np.count_nonzero(hits)))
        self._count(record)

    def _count(self, record: StepRecord) -> None:
        tally, verified = self._tally, np.bincount(record.tree.rows[record.chosen], minlength=record.batch.size)
        tally.sample_steps += record.batch.size
        tally.drafted_sample_steps += int(np.count_nonzero(verified))
        tally.verified += len(record.chosen)
        tally.accepted += int(record.accepted.sum())
        classes = np.bincount(np.searchsorted(TALLY_EDGES, verified), minlength=len(TALLY_EDGES) + 1)
        for each, count in enumerate(classes.tolist()):
            tally.sample_steps_by_verified[each] += count

    def take_tally(self) -> DraftingTally:
        """What was counted since the last call, at the end of a rollout."""
        self.watch.settle()
        taken, self._tally = self._tally, DraftingTally()
        taken.collapsed_rate = self.watch.rate if self.watch.without_hope else None
        taken.usual_rate = self.watch.usual
        return taken
