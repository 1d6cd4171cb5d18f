"""A drafting policy under oversight: control steps without drafts, the watch for a collapse, and counting."""

from __future__ import annotations

import numpy as np

from rlhfspec_mega.planning.tree import Batch, DraftingPolicy, DraftTree, Ints, StepRecord
from rlhfspec_mega.types import TALLY_EDGES, DraftingTally

FIRST_CONTROL, CONTROL_EVERY = 32, 128  # steps before the first, and from one to the next: 3% of what speculation gains
# Plain steps of a control. The first ones after drafted steps take longer than the rest (on a CPU, in batches of up to
# eight, about a tenth): the last one counts.
CONTROL_STEPS = 4
SHARED = 7 / 8  # of the samples, at least, are in both steps of a pair

LEAST = 200  # first draft tokens that are judged at once
LEAST_OF_TRIAL = 40  # the same where drafting was stopped and is tried again
NEWEST = 0.2  # weight of a further full window in the usual rate


class PlainControl:
    """Pairs the last step of every control with the step before the control, if hardly any sample came or went."""

    def __init__(self) -> None:
        self._steps = 0
        self._before: StepRecord | None = None
        self._place = 0  # of the step that is taken in its control, from 1

    def is_due(self) -> bool:
        """Whether the next step is to decode plainly; asked once a step."""
        place = (self._steps - FIRST_CONTROL) % CONTROL_EVERY
        self._place = place + 1 if self._steps >= FIRST_CONTROL and place < CONTROL_STEPS else 0
        self._steps += 1
        return self._place > 0

    def observe(self, record: StepRecord, tally: DraftingTally) -> None:
        """Note a step; if it ends a control, add the pair to the tally."""
        before, now = self._before, record.batch
        if self._place == 0:
            self._before = record
        elif self._place == CONTROL_STEPS and before is not None:
            shared = len(np.intersect1d(before.batch.samples, now.samples))
            if shared >= SHARED * max(before.batch.size, now.size):
                tokens = before.batch.size + int(before.accepted.sum())
                tally.paired_seconds += before.draft_seconds + before.verify_seconds
                tally.paired_plain_seconds += tokens * (record.draft_seconds + record.verify_seconds) / now.size


class CollapseWatch:
    """Follows how often the draft's best first token is the target's choice, for all samples that are drafted for.

    Verified or not: unlike accepted length, and unlike the rate among verified ones, no policy's choice of nodes moves
    it. A rate below `ratio` of the usual one is a collapse: a broken weight sync, or a policy that has moved away.
    Drafting then stops until the next weight update, which alone can mend it, and is tried again for a short window.

    Args:
        stops: whether a collapse stops drafting; else it is only said.

    Attributes:
        collapsed: the last window was a collapse.
        rate: of the last full window, None before it.
        usual: of the windows before, None before the first; set it to go on from an earlier run.
    """

    def __init__(self, ratio: float, stops: bool = True) -> None:
        self._ratio, self._stops = ratio, stops
        self.collapsed = self._on_trial = False
        self.rate: float | None = None
        self.usual: float | None = None
        self._judged = self._accepted = 0

    def weights_changed(self) -> None:
        """Begin a new window: what was seen before an update says nothing of the time after it.

        What is too little to be judged goes on counting: else a draft that is hardly used would never be.
        """
        if self.without_hope or self._judged >= LEAST_OF_TRIAL:
            self._judged = self._accepted = 0
        self._on_trial = self.collapsed

    def settle(self) -> None:
        """A rollout is over: judge a window that did not become full, if it is long enough for a trial."""
        if self._judged >= LEAST_OF_TRIAL:
            self._judge()

    @property
    def without_hope(self) -> bool:
        """The last window was a collapse, and weights have not changed since."""
        return self.collapsed and not self._on_trial

    @property
    def may_draft(self) -> bool:
        return not (self._stops and self.without_hope)

    def count(self, judged: int, accepted: int) -> None:
        """Best first tokens of a step; judge when there are enough."""
        self._judged += judged
        self._accepted += accepted
        if self._judged >= (LEAST_OF_TRIAL if self._on_trial else LEAST):
            self._judge()

    def _judge(self) -> None:
        self.rate = self._accepted / self._judged
        self.collapsed = self.usual is not None and self.rate < self._ratio * self.usual
        if not self.collapsed and not self._on_trial:  # a trial is too short to say what is usual
            news = NEWEST * min(1.0, self._judged / LEAST)
            self.usual = self.rate if self.usual is None else self.usual + news * (self.rate - self.usual)
        self._judged = self._accepted = 0
        self._on_trial = False


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
