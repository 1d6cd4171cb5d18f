"""Which way to make a step pays at a batch size: measured, forecast where nothing was measured, and tried anew."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel
from rlhfspec_mega.planning.forecast import Forecast, StepView, drafting_rate
from rlhfspec_mega.planning.mode_gains import (
    DRAFTED,
    FORECAST_WEIGHT,
    MOST_WORK,
    PLAIN,
    RECALLED,
    Gains,
    add_step,
    kept_of_forecasts,
    learn_rests,
    most_work,
    overall_gain,
    worth_following,
)
from rlhfspec_mega.planning.tree import Bools, Floats, Ints, StepRecord
from rlhfspec_mega.planning.whole_rollouts import WholeRollouts
from rlhfspec_mega.types import BATCH_BUCKETS, DECODE_MODES, batch_bucket

# Steps for which a decision is kept while the batch stays in its bucket, at first, and at most once it has come again
# and again: deciding itself takes time.
HOLD_STEPS, LONGEST_HOLD = 8, 128
RESTS = 32  # plain steps in a row, at most, that are asked about and told of together
FORECAST_EVERY = 64  # steps between two forecasts
HYSTERESIS = 1.02  # by which another mode must be better than the one in use
# Steps, in whatever mode, after which what was measured counts a third: histories grow, drafts learn. What was measured
# of history counts a third after half of the run's steps so far, if they are fewer: a history that has grown to the
# double is another one. At all batch sizes together that is so in every run, long or short.
AGE, YOUNG_AGE = 300.0, 0.5
FIRST_GAIN = 1.15  # of history where little is known: to find out costs a few steps, not to use it costs all of them

TRIAL_STEPS = 4  # of a mode that is not in use
TRIAL_SHARE = 0.005  # share of the time that the trials of a mode may lose
# By mode, how many times that share the first trial may lose; the next ones lose less and less. History is short at
# first, and then soon gives more. Of drafting there are forecasts, and of plain steps there are always some.
FIRST_TRIALS = (1, 10, 1)
# By mode, steps' time that a trial is taken to lose at least. Controls (`oversight`) are plain steps, too.
LEAST_LOST = (0.5, 0.2, 0.2)
TRIAL_AT_LATEST = 5000  # steps after which a mode is tried whatever it loses
# Plain steps in a row before one whose time is used. The first plain steps after drafting take longer (see
# `oversight.CONTROL_STEPS`); by them drafting would look better than it is.
SETTLING = 3


class ModeChoice:
    """Chooses a mode for each step by its gain: tokens per second over those that plain steps are predicted to give.

    By bucket of batch sizes, a mode's gain is the sum of its tokens, in those of plain steps, over that of its time, in
    the time of plain steps, where older steps count less. So it contains all that a mode costs beside what models
    predict. A forecast stands in until enough is measured. As much of a gain counts as whole rollouts keep. A mode that
    is not in use is tried for a few steps in a row, as often as that loses a small share of the time.

    Args:
        width, depth, max_nodes: of the policy's trees.
        fixed_depth: whether all usable layers are always drafted; otherwise drafting may end after any layer.

    Attributes:
        trying: whether the current step belongs to a trial.
    """

    def __init__(
        self, acceptance: AcceptanceModel, cost: CostModel, width: int, depth: int, max_nodes: int, fixed_depth: bool
    ) -> None:
        self._cost, self._max_nodes, self._fixed_depth = cost, max_nodes, fixed_depth
        self._forecast = Forecast(acceptance, width, depth)
        self._depth = depth
        self._rates: dict[tuple[int, float | None], float] = {}  # forecasts by batch size and temperature
        self._forecasts_until, self._looked_ahead = FORECAST_EVERY, 0
        modes = len(DECODE_MODES)
        self._gains = Gains(
            measured=np.zeros((BATCH_BUCKETS, modes, 2)),
            overall=np.zeros((modes, 2)),
            tally=np.zeros((BATCH_BUCKETS, modes, 2)),
            forecast=np.zeros(BATCH_BUCKETS),
            forecast_kept=np.zeros(2),
        )
        self._aged = 0  # steps when they last got older
        self._came = np.zeros(BATCH_BUCKETS, np.bool_)  # whether drafting was looked at for a batch of this size
        self._whole = WholeRollouts(cost)
        self._steps, self._plain_steps = 0, SETTLING
        # By bucket, the best mode when last looked at, until which step it is kept, and for how many it was kept last.
        self._held, self._held_until, self._hold = ([value] * BATCH_BUCKETS for value in (PLAIN, 0, 0))
        self._promised = [0.0] * BATCH_BUCKETS  # gain of the next best mode when the one that is held was chosen
        # Plain steps that nothing was asked about and nothing was learnt from yet: size, KV tokens, whether the steps
        # before were plain, too, and seconds of each step, by row; and how many steps these are.
        self._rests: list[tuple[int, int, bool, Sequence[float]]] = []
        self._rested = 0
        self._undrafted = [False] * BATCH_BUCKETS  # whether that was decided while the draft model could not be used
        self._trials = [0] * modes
        self._due: dict[int, float] = {}  # steps at which modes are to be tried
        self._time = 0.0, 0.0  # sums of seconds and of steps, in which older steps count less
        self._trial, self._left, self._lost, self._beside = PLAIN, 0, 0.0, 1.0  # the last: gain of the mode in use
        self.trying = False

    def follows(self, size: int) -> bool:
        """Whether to follow samples of a batch of this size: drafting pays, or is unknown, at this size or at smaller
        ones to which the batch will shrink, for enough of the time, or it is to be tried.

        In rollouts whose samples all end together there are no smaller batches.
        """
        buckets = slice(batch_bucket(size) + 1)
        # Asked for whether or not a trial is due: a rehearsal compiles it only if it is called there.
        worth = worth_following(
            self._gains, self._came[buckets], self._whole.kept(size), self._whole.shares(size)[buckets]
        )
        return worth or self._steps >= self._due.get(DRAFTED, 0)

    def rests(self, size: int, able: bool) -> int:
        """How many steps of this batch size are plain for now; `able`: whether there is anything to draft from."""
        if self._left:
            return 0
        bucket, most = batch_bucket(size), RESTS if self._plain_steps >= SETTLING else 1
        if not able:
            return most
        return min(most, max(0, self._held_until[bucket] - self._steps)) if self._held[bucket] == PLAIN else 0

    def choose(self, step: StepView, usable: int, recalls: bool) -> int:
        """The mode of a step.

        Args:
            usable: layers that the draft model may draft; 0 without one.
            recalls: whether there is history.
        """
        self._end_rest()
        bucket = batch_bucket(step.size)
        able = [PLAIN, *([RECALLED] if recalls else []), *([DRAFTED] if usable else [])]
        self.trying = self._left > 0 and self._trial in able
        if self.trying:
            return self._trial
        if self._left:
            self._end_trial()
        if self._steps < self._held_until[bucket] and self._held[bucket] in able:
            return self._held[bucket]
        self._grow_older()
        if self._steps >= self._forecasts_until:
            self._forecasts_until = self._steps + FORECAST_EVERY
            self._forecast.clear()
            self._rates.clear()
        if usable:
            self._came[bucket] = True
            self._forecast_smaller(step)
        gains = {mode: self.gain(step, mode) * self._kept_of(mode, step.size) for mode in able}
        best = max(able, key=lambda mode: gains[mode] * (HYSTERESIS if mode == self._held[bucket] else 1.0))
        if best != self._held[bucket]:
            self._held[bucket], self._hold[bucket] = best, 0
        for mode in able:
            slower = (1.0 - gains[mode] / gains[best]) * step.plain_seconds / self._usual_seconds(step.plain_seconds)
            if mode != best and self._trial_is_due(mode, slower):
                self._trial, self._lost, self._beside, self.trying = mode, 0.0, gains[best], True
                self._left = TRIAL_STEPS + (SETTLING if mode == PLAIN else 0)
                return mode
        self._promised[bucket] = max((gains[mode] for mode in able if mode != best), default=0.0)
        self._hold[bucket] = min(2 * self._hold[bucket], LONGEST_HOLD) or HOLD_STEPS
        self._held_until[bucket], self._undrafted[bucket] = self._steps + self._hold[bucket], not usable
        return best

    def _grow_older(self) -> None:
        """What was measured counts less than at the last call."""
        passed, self._aged = self._steps - self._aged, self._steps
        if passed:
            gains, young = self._gains, YOUNG_AGE * self._steps
            gains.measured[:] *= math.exp(-passed / AGE)
            if young < AGE:
                gains.measured[:, RECALLED] *= math.exp(passed / AGE - passed / young)
            gains.overall[RECALLED] *= math.exp(-passed / young)

    def _kept_of(self, mode: int, size: int) -> float:
        """The share of a mode's gain that whole rollouts keep."""
        return 1.0 if mode == PLAIN else self._whole.kept(size)

    def gain(self, step: StepView, mode: int) -> float:
        """See above; 1 is the pace that plain steps are predicted to have."""
        bucket = batch_bucket(step.size)
        if mode == DRAFTED:
            self._gains.forecast[bucket] = self._forecast_gain(step)
        return self._gain_at(bucket, mode)

    def _gain_at(self, bucket: int, mode: int) -> float:
        """The gain in a bucket of batch sizes, by the last forecast if it is one of drafting."""
        gains = self._gains
        if mode == PLAIN:
            expected = overall_gain(gains, PLAIN)
        elif mode == RECALLED:
            tokens, work = gains.overall[mode]
            hoped = FORECAST_WEIGHT * FIRST_GAIN * overall_gain(gains, PLAIN)
            expected = float((tokens + hoped) / (work + FORECAST_WEIGHT))
        else:
            expected = float(gains.forecast[bucket]) * kept_of_forecasts(gains)
        tokens, work = self._gains.measured[bucket, mode]
        return float((tokens + FORECAST_WEIGHT * expected) / (work + FORECAST_WEIGHT))

    def measured(self, size: int, mode: int) -> float:
        """The gain at a batch size, without forecasts; 0 if too little was measured."""
        tokens, work = self._gains.measured[batch_bucket(size), mode]
        return float(tokens / work) if work >= 2 * FORECAST_WEIGHT else 0.0

    def overall(self, mode: int) -> float:
        """The gain over all batch sizes; 1 if nothing was measured. `gain` hopes for more, to have history tried."""
        return overall_gain(self._gains, mode)

    def observe(self, record: StepRecord, mode: int, step: StepView, forced: bool = False) -> None:
        """Record a step that was made in a mode.

        Args:
            forced: more was verified than was worth it: nothing is learnt of the mode's gain.
        """
        plain, reading = step.plain_seconds, self._reading_seconds(record)
        seconds = record.draft_seconds + record.verify_seconds
        if self._cost.frozen or seconds <= 0.0:
            seconds = step.draft_seconds(record.tree.depth, record.drafted)
            seconds += float(step.verify_seconds(len(record.chosen) + 1)[-1])
        tokens = 1.0 + int(record.accepted.sum()) / step.size
        if self._left and mode == self._trial:
            instead = plain * self._kept_of(mode, step.size) * tokens / self._beside
            took = min(seconds, most_work(self._gains, mode, tokens) * plain)
            self._lost += (took - instead) / self._usual_seconds(plain)
            self._left -= 1
            if not self._left:
                self._end_trial()
        reading = min(reading, 0.5 * seconds)
        self._whole.add_step(step.size, step.kv_tokens, tokens, seconds, reading, mode != PLAIN)
        self._count_time(min(seconds, MOST_WORK * tokens * plain), 1)
        seconds -= reading
        self._steps += 1
        settled = mode != PLAIN or self._plain_steps >= SETTLING
        self._plain_steps = self._plain_steps + 1 if mode == PLAIN else 0
        bucket, work = batch_bucket(step.size), seconds / plain
        add_step(self._gains, bucket, mode, tokens, work, settled and not forced)
        if mode != PLAIN and mode == self._held[bucket] and self._steps < self._held_until[bucket]:
            kept = self._kept_of(mode, step.size)
            if self._gain_at(bucket, mode) * kept * HYSTERESIS < self._promised[bucket]:
                self._held_until[bucket] = self._steps  # it does not give what it was chosen for

    def rested(self, size: int, kv_tokens: int, seconds: Sequence[float]) -> None:
        """Record plain steps in a row that nothing was asked about; `kv_tokens` are those of the first one."""
        self._rests.append((size, kv_tokens, self._plain_steps >= SETTLING, seconds))
        self._whole.had(size)
        steps = len(seconds)
        self._rested += steps
        self._steps += steps
        self._plain_steps += steps
        if self._rested >= LONGEST_HOLD:  # what was learnt before is not to be forgotten for a long rest
            self._end_rest()

    def ended(self, samples: Ints, tokens: Ints, joined: Floats, left: int) -> None:
        """See WholeRollouts.ended."""
        if left == 0:
            self._end_rest()
        self._whole.ended(samples, tokens, joined, left)

    def keep_to(self, mode: int) -> None:
        """Make all further steps in one mode, where it is possible."""
        self._held, self._held_until, self._left = [mode] * BATCH_BUCKETS, [sys.maxsize] * BATCH_BUCKETS, 0
        self._promised = [0.0] * BATCH_BUCKETS
        self._undrafted = [False] * BATCH_BUCKETS

    def draft_returns(self) -> None:
        """Decisions that were made while the draft model could not be used hold no more."""
        for bucket in range(BATCH_BUCKETS):
            if self._undrafted[bucket]:
                self._held_until[bucket] = 0

    def _end_rest(self) -> None:
        """Learn from the plain steps that nothing was asked about."""
        rests, self._rests, self._rested = self._rests, [], 0
        if not rests:
            return
        sizes, kv_tokens, settled, rows = zip(*rests, strict=True)
        batches, counts, seconds = np.array(sizes), np.array([*map(len, rows)]), np.concatenate(rows)
        plain = self._cost.plain_seconds_of(batches, np.array(kv_tokens))
        predicted = np.repeat(plain, counts)
        seconds = predicted if self._cost.frozen else np.where(seconds > 0.0, seconds, predicted)
        took, usual = learn_rests(self._gains, batches, plain, np.array(settled), counts, seconds)
        self._count_time(usual, len(seconds))
        for size, tokens, count, each in zip(sizes, kv_tokens, counts.tolist(), took.tolist(), strict=True):
            self._whole.add_step(size, tokens, float(count), each, 0.0, drafted=False, steps=count)

    def _count_time(self, seconds: float, steps: int) -> None:
        older = math.exp(-steps / AGE)
        self._time = older * self._time[0] + seconds, older * self._time[1] + steps

    def _usual_seconds(self, plain: float) -> float:
        """Seconds of a step in the mean of recent ones; before the first those of a plain step."""
        seconds, steps = self._time
        return seconds / steps if steps else plain

    def forget_draft(self) -> None:
        """The draft is another one: what drafting gave says nothing any more, and it is tried at once."""
        gains = self._gains
        gains.measured[:, DRAFTED] = gains.overall[DRAFTED] = gains.forecast[:] = 0.0
        gains.forecast_kept[:], self._came[:] = 0.0, False
        self._due[DRAFTED], self._trials[DRAFTED] = self._steps, 0
        self._held_until, self._hold = [0] * BATCH_BUCKETS, [0] * BATCH_BUCKETS

    def take_tally(self) -> tuple[list[float], list[float]]:
        """Sums of tokens and of time since the last call; see `DraftingTally`."""
        self._end_rest()
        tokens, work = self._gains.tally.reshape(-1, 2).T.tolist()
        self._gains.tally[:] = 0.0
        return tokens, work

    def state_dict(self) -> dict[str, Any]:
        """The gains as measured and forecast, as plain data for JSON."""
        self._end_rest()
        arrays = {name: array.tolist() for name, array in self._saved.items()}
        return arrays | {"steps": self._steps, "whole": self._whole.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """To be called before the first step."""
        for name, array in self._saved.items():
            array[:] = state[name]
        self._steps = self._aged = state.get("steps", round(AGE / YOUNG_AGE))  # without it: of a run that is not young
        self._whole.load_state_dict(state["whole"])

    @property
    def _saved(self) -> dict[str, Floats | Bools]:
        gains = self._gains
        return {
            "measured": gains.measured,
            "overall": gains.overall,
            "forecast_kept": gains.forecast_kept,
            "forecast_gains": gains.forecast,
            "came": self._came,
        }

    def _forecast_gain(self, step: StepView) -> float:
        key = step.size, step.temperature
        if key not in self._rates:
            expected = self._forecast.for_batch(step.batch)
            self._rates[key] = drafting_rate(
                expected, self._cost, step.batch, self._depth, self._max_nodes, self._fixed_depth
            )
        return self._rates[key] * step.plain_seconds / step.size

    def _forecast_smaller(self, step: StepView) -> None:
        """Forecast what drafting gives at sizes to which the batch will shrink and that have not come yet."""
        if self._looked_ahead == self._forecasts_until:
            return
        self._looked_ahead = self._forecasts_until
        for bucket in np.flatnonzero(~self._came[: batch_bucket(step.size)]).tolist():
            smaller = StepView(step.batch.first(2**bucket), self._cost)
            self._gains.forecast[bucket] = self._forecast_gain(smaller)

    def _reading_seconds(self, record: StepRecord) -> float:
        """Seconds that the draft took to read what plain steps had left unread: later steps have them, too."""
        batch = record.batch
        if not record.tree.depth or batch.backlog <= 2 * batch.size:
            return 0.0
        first = [self._cost.draft_seconds_scalar(batch.size, 0, unread, 1, 0) for unread in (batch.backlog, batch.size)]
        return max(0.0, first[0] - first[1])

    def _trial_is_due(self, mode: int, slower: float) -> bool:
        if mode not in self._due:
            unknown = mode == RECALLED and not self._gains.overall[mode, 1]
            self._plan_trial(mode, 0.0 if unknown else max(TRIAL_STEPS * slower, LEAST_LOST[mode]))
        return self._steps >= self._due[mode]

    def _end_trial(self) -> None:
        self._left = 0
        self._plan_trial(self._trial, max(self._lost, LEAST_LOST[self._trial]))

    def _plan_trial(self, mode: int, lost: float) -> None:
        """Try a mode when a trial that loses the time of so many steps is a small share of the time; the first trials
        of history come sooner. The steps are usual ones: a trial may be made in a large batch, whose steps take longer.
        """
        share = TRIAL_SHARE * max(1.0, FIRST_TRIALS[mode] / (1 + self._trials[mode]))
        self._due[mode] = self._steps + min(lost / share, TRIAL_AT_LATEST)
        self._trials[mode] += 1
