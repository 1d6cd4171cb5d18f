"""Monitoring of a drafting policy: plain control steps, detection of a useless draft, and counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlhfspec_mega.compiled import compiled
from rlhfspec_mega.planning.strategy import CalibratedPolicy
from rlhfspec_mega.planning.tree import Batch, Bools, DraftingPolicy, DraftTree, Floats, Ints, Recall, StepRecord
from rlhfspec_mega.types import TALLY_EDGES, DraftingTally

# Steps before the first control, and between the starts of two controls. Controls cost 3% of what speculation gains.
FIRST_CONTROL, CONTROL_EVERY = 32, 128
# Plain steps of a control. The first plain steps after drafted ones take longer than the rest (on a CPU, in batches of
# up to eight, about a tenth longer), so only the last one is compared.
CONTROL_STEPS = 4
MIN_SHARED = 7 / 8  # share of the samples that both steps of a pair must contain

WINDOW_SIZE = 200  # first draft tokens in a window, over which one acceptance rate is taken
TRIAL_SIZE = 40  # the same for a trial, in which drafting is tried again after a collapse
NEW_WINDOW_WEIGHT = 0.2  # weight of a new full window in the moving average of the usual rate


class PlainControl:
    """Compares a plain step with the drafted step before it, at intervals, to measure the speedup of speculation.

    A control is a few plain steps in a row. Its last step is paired with the last step before it, provided that the two
    batches have nearly the same samples.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._before: tuple[Ints, int, float] | None = None  # numbers of samples, new tokens and seconds of a step
        self._control_step = 0  # number of the current step within its control, from 1; 0 outside a control

    def begin_step(self) -> None:
        """Begin a step, which is plain or not. Must be called once per step that is not skipped."""
        place = (self._steps - FIRST_CONTROL) % CONTROL_EVERY
        self._control_step = place + 1 if self._steps >= FIRST_CONTROL and place < CONTROL_STEPS else 0
        self._steps += 1

    @property
    def free(self) -> int:
        """Outside a control, steps up to the next one, the current step among them."""
        return CONTROL_EVERY - (self._steps - 1 - FIRST_CONTROL) % CONTROL_EVERY

    def skip(self, steps: int) -> None:
        """Pass over further steps, which are plain, and not asked about."""
        self._steps += steps

    @property
    def running(self) -> bool:
        """Whether this step must decode without a draft."""
        return self._control_step > 0

    def observe(self, samples: Ints, tokens: int, seconds: float, tally: DraftingTally) -> None:
        """Record a step's samples, new tokens and seconds; if it ends a control, add the pair to the tally."""
        if self._control_step == 0:
            self._before = samples, tokens, seconds
        elif self._control_step == CONTROL_STEPS and self._before is not None:
            samples_before, tokens_before, seconds_before = self._before
            shared = len(np.intersect1d(samples_before, samples))
            if shared >= MIN_SHARED * max(len(samples_before), len(samples)):
                tally.paired_seconds += seconds_before
                tally.paired_plain_seconds += tokens_before * seconds / len(samples)


class CollapseWatch:
    """Detects a draft that has become useless, from how often its best first token is the target's choice.

    This rate is taken over all samples that are drafted for, whether the token was verified or not. So, unlike accepted
    length, it does not depend on which nodes the policy chooses. A rate below `ratio` times the usual one is a
    collapse: the cause is a broken weight sync, or a target that has moved far from the draft. Drafting then stops
    until the next weight update, since only new weights can help, and is tried again over a short window.

    Args:
        stops: whether a collapse stops drafting; otherwise it is only reported.

    Attributes:
        collapsed: whether the last full window was a collapse; stays True during a trial.
        rate: acceptance rate of the last full window; None before the first.
        usual: moving average of earlier rates without a collapse; None before the first. A resumed run sets it.
    """

    def __init__(self, ratio: float, stops: bool = True) -> None:
        self._ratio, self._stops = ratio, stops
        self.collapsed = self._on_trial = False
        self.rate: float | None = None
        self.usual: float | None = None
        self._judged = self._accepted = 0

    def weights_changed(self) -> None:
        """Begin a new window after a weight update, since earlier outcomes say nothing about the new weights.

        An unfinished window with fewer than TRIAL_SIZE tokens is kept, unless drafting was stopped: otherwise a draft
        that is rarely used would never fill a window.
        """
        if self.awaits_weight_update or self._judged >= TRIAL_SIZE:
            self._judged = self._accepted = 0
        self._on_trial = self.collapsed

    def end_rollout(self) -> None:
        """Judge the current window although it is not full, if it has at least TRIAL_SIZE tokens."""
        if self._judged >= TRIAL_SIZE:
            self._judge()

    @property
    def awaits_weight_update(self) -> bool:
        """Whether the last window was a collapse and the weights have not changed since."""
        return self.collapsed and not self._on_trial

    @property
    def may_draft(self) -> bool:
        return not (self._stops and self.awaits_weight_update)

    def count(self, judged: int, accepted: int) -> None:
        """Add one step: `judged` best first tokens, `accepted` of which the target chose. Judges a full window."""
        self._judged += judged
        self._accepted += accepted
        if self._judged >= (TRIAL_SIZE if self._on_trial else WINDOW_SIZE):
            self._judge()

    def _judge(self) -> None:
        self.rate = self._accepted / self._judged
        self.collapsed = self.usual is not None and self.rate < self._ratio * self.usual
        if not self.collapsed and not self._on_trial:  # a trial is too short to update the usual rate
            weight = NEW_WINDOW_WEIGHT * min(1.0, self._judged / WINDOW_SIZE)
            self.usual = self.rate if self.usual is None else self.usual + weight * (self.rate - self.usual)
        self._judged = self._accepted = 0
        self._on_trial = False


class MonitoredPolicy(DraftingPolicy):
    """A `DraftingPolicy` around another one: adds plain control steps, the collapse watch and counters.

    Args:
        policy: decides all steps that are not plain by order of the control or the watch.
        stops: whether a collapse stops drafting. If not, no decision depends on steps before the last `replace_policy`.
        temperature: only samples of this temperature count for the collapse watch, because a draft is right more often
            at lower temperatures; None: all samples count.
    """

    def __init__(
        self, policy: DraftingPolicy, collapse_ratio: float, stops: bool = True, temperature: float | None = None
    ) -> None:
        self.width, self.max_depth, self.max_nodes = policy.width, policy.max_depth, policy.max_nodes
        self._tally = DraftingTally()
        self.watch, self._temperature = CollapseWatch(collapse_ratio, stops), temperature
        self._stopped = False  # whether the watch has stopped the draft, which new weights may have mended since
        self.replace_policy(policy)

    def replace_policy(self, policy: DraftingPolicy) -> None:
        """Continue with another policy of the same width, depth and nodes; counters and collapse watch are kept."""
        if hasattr(self, "policy"):
            self._count_modes()
        self.policy = policy
        self._control = PlainControl()

    def follows(self, size: int) -> bool:
        return self.policy.follows(size)

    def rests(self, size: int, able: bool) -> int:
        if not self.watch.may_draft:
            self._stopped = True
        elif self._stopped:
            self._stopped = False
            if isinstance(self.policy, CalibratedPolicy) and self.policy.modes:
                self.policy.modes.forget_draft()
        self._control.begin_step()
        if self._control.running:
            return 1
        return min(self.policy.rests(size, able), self._control.free)

    def rested(self, samples: Ints, kv_tokens: int, seconds: Sequence[float]) -> None:
        size = len(samples)
        self._control.observe(samples, size, seconds[-1], self._tally)
        self._control.skip(len(seconds) - 1)
        self._tally.sample_steps += size * len(seconds)
        self._tally.sample_steps_by_verified[0] += size * len(seconds)
        self.policy.rested(samples, kv_tokens, seconds)

    def ended(self, samples: Ints, tokens: Ints, joined: Floats, left: int) -> None:
        self.policy.ended(samples, tokens, joined, left)

    def draft_returns(self) -> None:
        self.policy.draft_returns()

    def recall(self, batch: Batch) -> Recall | None:
        return self.policy.recall(self._allowed(batch))

    def depth(self, batch: Batch) -> int:
        found = self.policy.depth(self._allowed(batch))  # where nothing may be drafted, it may have a trial to end
        return found if self.watch.may_draft else 0

    def _allowed(self, batch: Batch) -> Batch:
        """The batch, for which the draft cannot be run while the watch stops it."""
        return batch if self.watch.may_draft else replace(batch, draftable=False)

    def expand(self, batch: Batch, tree: DraftTree) -> Ints:
        return self.policy.expand(batch, tree)

    def choose(self, batch: Batch, tree: DraftTree) -> Ints:
        return self.policy.choose(batch, tree)

    def observe(self, record: StepRecord) -> None:
        self.policy.observe(record)
        size, seconds = record.batch.size, record.draft_seconds + record.verify_seconds
        self._control.observe(record.batch.samples, size + int(record.accepted.sum()), seconds, self._tally)
        hits = record.root_hits
        if self._temperature is not None and len(hits):
            drafted_for = record.tree.rows[(record.tree.depths == 1) & (record.tree.ranks == 0)]
            hits = hits[record.batch.temperatures[drafted_for] == self._temperature]
        self.watch.count(len(hits), int(np.count_nonzero(hits)))
        self._count(record)

    def _count(self, record: StepRecord) -> None:
        tally, tree, size = self._tally, record.tree, record.batch.size
        recalled, *classes = _counted(tree.rows, tree.ranks, record.chosen, record.accepted, size, TALLY_EDGES).tolist()
        tally.sample_steps += size
        tally.drafted_sample_steps += size - classes[0]
        tally.verified += len(record.chosen)
        tally.accepted += int(np.count_nonzero(record.accepted))
        tally.recalled += recalled
        for each, count in enumerate(classes):
            tally.sample_steps_by_verified[each] += count

    def _count_modes(self) -> None:
        if isinstance(self.policy, CalibratedPolicy) and self.policy.modes:
            tokens, seconds = self.policy.modes.take_tally()
            tally = self._tally
            tally.mode_tokens = [a + b for a, b in zip(tally.mode_tokens, tokens, strict=True)]
            tally.mode_seconds = [a + b for a, b in zip(tally.mode_seconds, seconds, strict=True)]

    def take_tally(self) -> DraftingTally:
        """Counters since the last call. Call it at the end of a rollout: it also judges the watch's last window."""
        self.watch.end_rollout()
        self._stopped |= not self.watch.may_draft  # weights may come before the next step
        self._count_modes()
        taken, self._tally = self._tally, DraftingTally()
        taken.collapsed_rate = self.watch.rate if self.watch.awaits_weight_update else None
        taken.usual_rate = self.watch.usual
        return taken


@compiled
def _counted(rows: Ints, ranks: Ints, chosen: Ints, accepted: Bools, size: int, edges: tuple[int, ...]) -> Ints:
    """Accepted nodes that the draft model did not name; then samples by their number of verified nodes, in classes."""
    found, verified = np.zeros(len(edges) + 2, np.int64), np.zeros(size, np.int64)
    for place in range(len(chosen)):
        verified[rows[chosen[place]]] += 1
        found[0] += accepted[place] and ranks[chosen[place]] < 0
    for row in range(size):
        own = 1
        for edge in edges:
            own += verified[row] > edge
        found[own] += 1
    return found
