"""The choice among plain steps, history's tokens and the draft model: by what is measured, at a bounded price."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel
from rlhfspec_mega.planning.forecast import StepView
from rlhfspec_mega.planning.mode_gains import MEMORY, bucket_of
from rlhfspec_mega.planning.modes import (
    DRAFTED,
    FIRST_GAIN,
    PLAIN,
    RECALLED,
    RESTS,
    SETTLING,
    TRIAL_AT_LATEST,
    ModeChoice,
)
from rlhfspec_mega.planning.tree import DraftTree, StepRecord
from rlhfspec_mega.types import BATCH_BUCKETS, DECODE_MODES, batch_bucket
from tests.synthetic_drafts import make_batch
from tests.unit.test_strategy import cost_of

MACHINE = (1e-2, 1e-4, 2e-3, 1e-4)


def measured_cost() -> CostModel:
    cost = cost_of(*MACHINE)
    cost.frozen = False
    return cost


def make_choice(cost: CostModel) -> ModeChoice:
    return ModeChoice(AcceptanceModel(), cost, 4, 8, 32, fixed_depth=False)


class Engine:
    """Makes steps of true gains: a step gives 1 to 3 tokens per sample, in the time that the gain implies, with noise.

    Attributes:
        work: time of all steps, in that of plain steps.
        tokens: of all steps, in those of plain steps.
        rows: whether plain steps are made in rows, as many as the choice allows.
    """

    def __init__(self, choice: ModeChoice, cost: CostModel, gains: dict[int, float], seed: int = 0) -> None:
        self.choice, self.cost, self.gains = choice, cost, gains
        self._random = np.random.default_rng(seed)
        self.work = self.tokens = 0.0
        self.modes: list[int] = []
        self.rows = False

    def step(self, size: int) -> None:
        batch = make_batch(size, self._random)
        plain = self.cost.plain_seconds(size, batch.kv_tokens)
        if steps := self.choice.rests(size, True):
            row = (plain / self.gains[PLAIN] * self._random.uniform(0.9, 1.1, steps if self.rows else 1)).tolist()
            self.choice.rested(size, batch.kv_tokens, row)
            for each in row:
                self._count(PLAIN, 1.0, each / plain)
            return
        step = StepView(batch, self.cost)
        mode = self.choice.choose(step, 8 if DRAFTED in self.gains else 0, RECALLED in self.gains)
        accepted = np.zeros(2 * size, bool)
        accepted[: 0 if mode == PLAIN else self._random.integers(0, 2 * size + 1)] = True
        tokens = 1.0 + accepted.sum() / size
        # Time is what the mean tokens of the mode take at its true gain.
        seconds = (1.0 if mode == PLAIN else 2.0) / self.gains[mode] * plain * self._random.uniform(0.9, 1.1)
        record = StepRecord(batch, DraftTree(), np.arange(2 * size), accepted, 0, 0.0, seconds)
        self.choice.observe(record, mode, step)
        self._count(mode, tokens, seconds / plain)

    def _count(self, mode: int, tokens: float, work: float) -> None:
        self.modes.append(mode)
        self.tokens += tokens
        self.work += work


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([1, 3, 24]),
    st.floats(0.5, 2.0),
    st.floats(0.3, 2.5),
    st.integers(0, 1000),
)
@example(1, 0.5, 1.0, 0)  # history is looked at anew while a decision for drafting has been kept for long
def test_little_is_lost_against_the_best_mode_in_hindsight(
    size: int, recalled: float, drafted: float, seed: int
) -> None:
    cost = measured_cost()
    gains = {PLAIN: 1.0, RECALLED: recalled, DRAFTED: drafted}
    engine = Engine(make_choice(cost), cost, gains, seed)
    for _ in range(3000):
        engine.step(size)
    assert engine.tokens / engine.work > 0.94 * max(gains.values())


def test_history_that_was_short_at_first_is_tried_again_while_the_run_is_young() -> None:
    """In the first rollout it gives little at all batch sizes; from the second one on it pays."""
    cost = measured_cost()
    engine = Engine(make_choice(cost), cost, {PLAIN: 1.0, RECALLED: 0.6, DRAFTED: 0.5}, seed=1)
    for rollout in range(6):
        engine.gains[RECALLED] = 1.3 if rollout else 0.6
        for size in (48, 24, 12, 6, 3, 1):
            for _ in range(10):
                engine.step(size)
    assert engine.modes[-60:].count(RECALLED) > 50


def test_what_was_measured_counts_more_than_the_forecast() -> None:
    cost = measured_cost()
    choice = make_choice(cost)
    batch = make_batch(4, np.random.default_rng(0))
    assert choice.choose(StepView(batch, cost), 8, False) == DRAFTED, "the forecast is good"
    engine = Engine(choice, cost, {PLAIN: 1.0, DRAFTED: 0.6})
    for _ in range(600):
        engine.step(4)
    assert engine.modes[0] == DRAFTED and set(engine.modes[-64:]) == {PLAIN}


def test_a_mode_that_came_to_pay_is_found() -> None:
    cost = measured_cost()
    engine = Engine(make_choice(cost), cost, {PLAIN: 1.0, RECALLED: 0.8})
    for _ in range(500):
        engine.step(8)
    assert set(engine.modes[-32:]) == {PLAIN}
    engine.gains[RECALLED] = 1.8
    for _ in range(3000):
        engine.step(8)
    assert engine.modes[-64:].count(RECALLED) > 56


def test_trials_of_a_hopeless_mode_are_rare_and_never_cease() -> None:
    cost = measured_cost()
    engine = Engine(make_choice(cost), cost, {PLAIN: 1.0, DRAFTED: 0.05})
    for _ in range(3 * TRIAL_AT_LATEST):
        engine.step(8)
    trials = engine.modes[500:].count(DRAFTED)
    assert 0 < trials < 0.002 * len(engine.modes)


def test_an_interruption_of_a_trial_does_not_put_off_the_next_one() -> None:
    due = []
    for gain in (0.5, 0.0001):
        cost = measured_cost()
        engine = Engine(make_choice(cost), cost, {PLAIN: 1.0, RECALLED: 0.5})
        choice = engine.choice
        while choice._trials[RECALLED] < 2:
            interrupted = choice._left == 1 and choice._trial == RECALLED
            engine.gains[RECALLED] = gain if interrupted else 0.5
            engine.step(8)
        due.append(choice._due[RECALLED] - choice._steps)
    assert due[0] <= due[1] < 5 * due[0]


def test_a_decision_ends_where_its_mode_does_not_give_what_it_was_chosen_for() -> None:
    cost = measured_cost()
    engine = Engine(make_choice(cost), cost, {PLAIN: 1.0, RECALLED: 1.4})
    for _ in range(200):
        engine.step(8)
    assert engine.modes[-1] == RECALLED and engine.choice._held_until[batch_bucket(8)] > engine.choice._steps + 16
    engine.gains[RECALLED] = 0.2
    made = len(engine.modes)
    while engine.modes[-1] == RECALLED:
        engine.step(8)
    assert len(engine.modes) - made < 40, "not all steps for which it was to hold"


def test_that_plain_steps_are_slower_than_predicted_is_no_reason_to_use_history() -> None:
    """A profile of nothing but plain steps is quicker than a run: what is not known yet is taken to be slower, too."""
    cost = measured_cost()
    engine = Engine(make_choice(cost), cost, {PLAIN: 0.7, RECALLED: 0.5, DRAFTED: 0.6})
    for _ in range(400):
        engine.step(8)
    choice, step = engine.choice, StepView(make_batch(1, np.random.default_rng(0)), cost)
    assert choice.gain(step, PLAIN) == pytest.approx(0.7, abs=0.05)
    choice._gains.overall[RECALLED] = choice._gains.measured[:, RECALLED] = 0.0
    assert choice.gain(step, RECALLED) == pytest.approx(FIRST_GAIN * 0.7, abs=0.05), "as if nothing were known of it"


def test_samples_are_followed_where_drafting_beats_plain_steps_as_they_are() -> None:
    """Plain steps take longer than predicted; drafting keeps as little of its forecast, and is better than they are."""
    cost = measured_cost()
    choice = make_choice(cost)
    choice._due[DRAFTED] = 10**9  # no trial
    for _ in range(20):
        choice.rested(1, 100, RESTS * [cost.plain_seconds(1, 100) / 0.8])
    choice._end_rest()
    choice._came[:], choice._gains.forecast[:] = True, 1.12
    assert choice.measured(1, PLAIN) == pytest.approx(0.8, abs=0.01) and choice.follows(1)
    assert choice._gain_at(0, DRAFTED) == pytest.approx(1.12 * 0.8, abs=0.02)
    choice._gains.forecast[:] = 0.9
    assert not choice.follows(1)


def test_the_clock_of_plain_steps_decides_nothing_if_costs_are_frozen() -> None:
    cost = CostModel.nominal(10**6, 10**5)
    choice = make_choice(cost)
    choice.rested(4, 400, [1e3, 1e-9])
    tokens, work = choice.take_tally()
    assert sum(tokens) == 2 and sum(work) == pytest.approx(2)


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 10**6)), min_size=1))
def test_rows_of_plain_steps_are_counted_as_single_ones(rows: list[tuple[int, int]]) -> None:
    cost = measured_cost()
    sizes, kv_tokens = map(np.array, zip(*rows, strict=True))
    single = [cost.plain_seconds(size, tokens) for size, tokens in rows]
    assert cost.plain_seconds_of(sizes, kv_tokens) == pytest.approx(np.array(single))
    assert [bucket_of(size) for size, _ in rows] == [batch_bucket(size) for size, _ in rows]


def test_samples_are_followed_where_drafting_may_pay_for_them() -> None:
    cost = measured_cost()
    choice = make_choice(cost)
    assert choice.follows(8), "nothing is known"
    large = Engine(choice, cost, {PLAIN: 1.0, DRAFTED: 0.2})
    for _ in range(300):
        large.step(8)
    assert choice.follows(8), "it may pay when few of them are left"
    for size in (1, 2, 4):
        small = Engine(choice, cost, {PLAIN: 1.0, DRAFTED: 0.2})
        for _ in range(300):
            small.step(size)
    assert not choice.follows(8)


def test_forecasts_of_sizes_to_come_are_made_anew() -> None:
    cost = cost_of(1e-2, 1e-4, 1.0, 1e-4)
    engine = Engine(make_choice(cost), cost, {PLAIN: 1.0, DRAFTED: 0.2})
    engine.choice._due[DRAFTED] = 10**9  # before a trial samples are followed whatever is expected
    for _ in range(300):
        engine.step(8)
    assert not engine.choice.follows(1), "drafting takes a hundred times a plain step, whatever the size"
    cost.load_state_dict(measured_cost().state_dict())
    for _ in range(300):
        engine.step(8)
    assert engine.choice.follows(1), "it has become quick, and may pay when one sample is left"


def test_the_clock_decides_nothing_if_costs_are_frozen() -> None:
    modes = []
    for slow in (1.0, 7.0):
        cost = CostModel.nominal(10**6, 10**5)
        engine = Engine(make_choice(cost), cost, {PLAIN: 1.0 / slow, RECALLED: slow, DRAFTED: 1.0})
        for _ in range(400):
            engine.step(4)
        modes.append(engine.modes)
    assert modes[0] == modes[1]


def test_the_tally_has_all_steps_once() -> None:
    cost = measured_cost()
    engine = Engine(make_choice(cost), cost, {PLAIN: 1.0, RECALLED: 1.3})
    engine.rows = True
    for size in (1, 2, 8, 8, 500):
        for _ in range(40):
            engine.step(size)
    tokens, work = engine.choice.take_tally()
    assert len(tokens) == len(work) == BATCH_BUCKETS * len(DECODE_MODES)
    assert sum(tokens) == pytest.approx(engine.tokens) and sum(work) == pytest.approx(engine.work, rel=0.02)
    assert sum(engine.choice.take_tally()[0]) == 0


def test_an_interruption_does_not_change_the_mode() -> None:
    cost = measured_cost()
    engine = Engine(make_choice(cost), cost, {PLAIN: 1.0, DRAFTED: 0.7})
    engine.rows = True
    for _ in range(1000):
        engine.step(8)
    while not engine.choice.rests(8, True):
        engine.step(8)
    engine.choice.rested(8, 800, [share * cost.plain_seconds(8, 800) for share in (1.0, 300.0, *[1.0] * 6)])
    made = len(engine.modes)
    while len(engine.modes) < made + 400:
        engine.step(8)
    assert engine.modes[made:].count(DRAFTED) <= 12


def test_a_new_draft_is_tried_at_once() -> None:
    cost = measured_cost()
    engine = Engine(make_choice(cost), cost, {PLAIN: 1.0, DRAFTED: 0.1})
    for _ in range(1000):
        engine.step(8)
    assert engine.modes[-100:].count(DRAFTED) == 0
    engine.gains[DRAFTED] = 1.6
    engine.choice.forget_draft()
    for _ in range(100):
        engine.step(8)
    assert engine.modes[-50:].count(DRAFTED) == 50


def test_gains_outlive_their_process() -> None:
    cost = measured_cost()
    gains = {PLAIN: 1.0, RECALLED: 0.8, DRAFTED: 0.6}
    engine = Engine(make_choice(cost), cost, gains)
    for _ in range(600):
        engine.step(4)
    later = make_choice(cost)
    later.load_state_dict(json.loads(json.dumps(engine.choice.state_dict())))
    assert later.state_dict() == engine.choice.state_dict()
    later._due = engine.choice._due  # how soon a trial comes is not kept
    assert [later.follows(size) for size in (1, 4, 24)] == [engine.choice.follows(size) for size in (1, 4, 24)]
    step = StepView(make_batch(4, np.random.default_rng(0)), cost)
    before = later.gain(step, RECALLED)
    assert later.choose(step, 8, False) == PLAIN
    for _ in range(30):
        later.rested(4, 400, [0.0])
    later.choose(step, 8, True)
    assert later.gain(step, RECALLED) == pytest.approx(before, abs=0.03), "a resumed run is not young"
    assert make_choice(cost).choose(step, 8, False) == DRAFTED, "it believes its forecast at first"


def test_decisions_made_without_a_draft_model_do_not_outlast_it() -> None:
    cost = measured_cost()
    choice = make_choice(cost)
    step = StepView(make_batch(4, np.random.default_rng(0)), cost)
    assert choice.choose(step, 0, False) == PLAIN and choice.rests(4, True)
    choice.draft_returns()
    assert not choice.rests(4, True) and choice.choose(step, 8, False) == DRAFTED


def test_plain_steps_are_told_of_together_once_they_have_settled() -> None:
    cost = measured_cost()
    choice = make_choice(cost)
    step = StepView(make_batch(4, np.random.default_rng(0)), cost)
    choice.choose(step, 8, False)
    assert choice.rests(4, True) == 0, "drafting looks best"
    assert choice.rests(4, False) == RESTS, "there is nothing to draft from"
    choice._plain_steps = 0
    assert choice.rests(4, False) == 1, "the first steps after drafted ones are slower than the rest"
    choice.keep_to(PLAIN)
    choice._plain_steps = SETTLING
    assert choice.rests(4, True) == RESTS
    choice._held_until[batch_bucket(4)] = choice._steps + 3
    assert choice.rests(4, True) == 3, "a decision holds for three more steps"


def test_steps_told_of_together_count_like_single_ones() -> None:
    cost = measured_cost()
    single, together = make_choice(cost), make_choice(cost)
    seconds = 1.1 * cost.plain_seconds(4, 400)
    for choice in (single, together):
        choice.keep_to(PLAIN)
    for _ in range(8 * 5):
        single.rested(4, 400, [seconds])
    for size in (4, 3, 4, 3, 4):  # of one bucket
        together.rested(size, 100 * size, 8 * [1.1 * cost.plain_seconds(size, 100 * size)])
    for ours, theirs in zip(single.take_tally(), together.take_tally(), strict=True):
        assert ours == pytest.approx(theirs)
    assert single._steps == together._steps == 40 and single._plain_steps == together._plain_steps
    assert single._usual_seconds(0.0) == pytest.approx(together._usual_seconds(0.0), rel=0.1)
    assert single.measured(4, PLAIN) == pytest.approx(together.measured(4, PLAIN)) == pytest.approx(1 / 1.1, rel=0.01)


def test_a_long_rest_is_learnt_from_before_its_end() -> None:
    cost = measured_cost()
    choice = make_choice(cost)
    for _ in range(1000):
        choice.rested(4, 400, RESTS * [cost.plain_seconds(4, 400)])
    choice._end_rest()
    assert choice._gains.measured[batch_bucket(4), PLAIN, 1] < 2 * MEMORY, "what is new counts beside it"


def test_the_draft_follows_nobody_until_its_trial_is_due() -> None:
    cost = measured_cost()
    engine = Engine(make_choice(cost), cost, {PLAIN: 1.0, DRAFTED: 0.1})
    for size in (1, 2, 4, 8):
        for _ in range(300):
            engine.step(size)
    choice = engine.choice
    assert choice._steps < choice._due[DRAFTED] and not choice.follows(8)
    while choice._steps < choice._due[DRAFTED]:
        choice.rested(8, 800, RESTS * [cost.plain_seconds(8, 800)])
    assert choice.follows(8)


def test_a_trial_in_a_large_batch_counts_by_the_time_of_usual_steps() -> None:
    """Two trials lose as many seconds: where usual steps take half as long that is twice as many of them."""
    due = []
    for usual in (0.5, 1.0):
        cost = measured_cost()
        engine = Engine(make_choice(cost), cost, {PLAIN: 1.0, DRAFTED: 0.5})
        choice = engine.choice
        choice._time = 300 * usual * cost.plain_seconds(24, 2400), 300.0
        choice._due[DRAFTED] = 0
        while not choice._trials[DRAFTED]:
            choice._held_until = [0] * BATCH_BUCKETS
            choice._gains.measured[:, DRAFTED] = 3.0, 6.0
            engine.step(24)
        due.append(choice._due[DRAFTED] - choice._steps)
    assert due[0] == pytest.approx(2.0 * due[1], rel=0.1)
