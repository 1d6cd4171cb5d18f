"""The simulation of rollouts against closed forms, a token-by-token reference, and its own books."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfspec_mega.planning.rollout_state import Ints, Move, Plan, RolloutPolicy, RolloutState
from rlhfspec_mega.simulate.curves import CostCurves, DecodeCurve, MigrationTimes
from rlhfspec_mega.simulate.lower_bound import lower_bound
from rlhfspec_mega.simulate.mechanisms import MECHANISMS
from rlhfspec_mega.simulate.mechanisms import simulate as run_mechanism
from rlhfspec_mega.simulate.rollout import Rollout, SimulatedRollout
from rlhfspec_mega.simulate.roofline import roofline
from rlhfspec_mega.simulate.scoring import Scoring
from rlhfspec_mega.simulate.workload import (
    LENGTH_DISTRIBUTIONS,
    Learned,
    Oracle,
    Predictions,
    Workload,
    draw_workload,
    start_places,
)

FLAT = DecodeCurve((1,), (1.0,), (0.0,))
LINEAR = DecodeCurve((1, 2), (1.0, 2.0), (0.0, 0.0))


def curves(curve: DecodeCurve = FLAT, slots: int = 4, **others: object) -> CostCurves:
    """Curves on which only decoding takes time, others aside."""
    free = CostCurves("test", {}, slots, 10**9, curve, None, 0.0, 0.0, 0.0, MigrationTimes(0.0, 0.0, 0.0))
    return replace(free, **others)  # type: ignore[arg-type]


def work(lengths: list[int], members: int = 1, prompt: int = 1) -> Workload:
    count = len(lengths)
    groups = np.arange(count) // members
    return Workload(groups, np.full(count, prompt), np.array(lengths), max(lengths))


class Recorder(Oracle):
    """The truth, and a count of how often each sample ended."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.ended: list[tuple[int, int]] = []

    def finished(self, sample: int, tokens: int) -> None:
        self.ended.append((sample, tokens))


@dataclass
class Scripted:
    """Makes given plans, one after the other."""

    plans: list[Plan]
    seen: list[RolloutState] = field(default_factory=list)

    def begin(self) -> None:
        self.seen.clear()

    def plan(self, state: RolloutState) -> Plan:
        self.seen.append(state)
        number = len(self.seen) - 1
        return self.plans[number] if number < len(self.plans) else Plan()


def rollout(
    workload: Workload,
    costs: CostCurves,
    places: list[int],
    engines: int = 1,
    policy: RolloutPolicy | None = None,
    plan_seconds: float = 1.0,
    fused: bool = True,
    on_demand: bool = False,
) -> SimulatedRollout:
    at = np.array(places)
    return make(workload, engines, costs, at, policy, Oracle(workload), plan_seconds, fused, on_demand).run()


def make(
    workload: Workload,
    engines: int,
    costs: CostCurves,
    places: Ints,
    policy: RolloutPolicy | None,
    predictions: Predictions,
    plan_seconds: float,
    fused: bool = True,
    on_demand: bool = False,
) -> Rollout:
    scoring = Scoring(engines, workload.totals, costs.scoring_seconds, costs.scoring_start, fused)
    return Rollout(workload, engines, costs, costs.plain, places, on_demand, policy, predictions, scoring, plan_seconds)


def stepwise(workload: Workload, costs: CostCurves) -> list[float]:
    """When each sample ends on one engine, token after token; samples begin in order as slots free up."""
    curve, now, ends = costs.plain, 0.0, [0.0] * len(workload.lengths)
    waiting = deque(range(len(ends)))
    live: dict[int, int] = {}
    read: set[int] = set()
    while waiting or live:
        while waiting and len(live) < costs.slots:
            sample = waiting.popleft()
            live[sample] = 0
            if workload.groups[sample] not in read:
                read.add(int(workload.groups[sample]))
                now += float(workload.prompts[sample]) * costs.prefill_seconds
        batch = len(live)
        kv = sum(int(workload.prompts[sample]) + tokens for sample, tokens in live.items()) + batch / 2
        now += float(np.interp(batch, curve.batches, curve.seconds))
        now += float(np.interp(batch, curve.batches, curve.kv_seconds)) * kv
        for sample in list(live):
            live[sample] += 1
            if live[sample] == workload.lengths[sample]:
                ends[sample] = now
                del live[sample]
    return ends


def test_equal_lengths_on_one_engine_end_together_in_waves() -> None:
    costs = curves(DecodeCurve((1, 4), (0.1, 0.25), (0.0, 0.0)), slots=4, prefill_seconds=0.01)
    result = rollout(work([50] * 8, members=2, prompt=7), costs, [0] * 8)
    wave = 2 * 7 * 0.01 + 50 * 0.25  # two prompts for four samples
    assert result.finished_at.tolist() == pytest.approx([wave] * 4 + [2 * wave] * 4)
    assert result.makespan == pytest.approx(2 * wave)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    members=st.integers(1, 3),
    slots=st.integers(1, 5),
    seconds=st.lists(st.floats(0.01, 1.0), min_size=5, max_size=5),
    kv_seconds=st.lists(st.floats(0.0, 0.01), min_size=5, max_size=5),
    prefill=st.floats(0.0, 0.1),
)
def test_one_engine_agrees_with_decoding_token_by_token(
    lengths: list[int], members: int, slots: int, seconds: list[float], kv_seconds: list[float], prefill: float
) -> None:
    curve = DecodeCurve((1, 2, 3, 4, 5), tuple(seconds), tuple(kv_seconds))
    workload, costs = work(lengths, members, prompt=3), curves(curve, slots, prefill_seconds=prefill)
    result = rollout(workload, costs, [0] * len(lengths))
    assert result.finished_at.tolist() == pytest.approx(stepwise(workload, costs), rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=20), engines=st.integers(1, 4))
def test_a_queue_hands_samples_to_the_engine_that_is_free_first(lengths: list[int], engines: int) -> None:
    places = [sample % engines for sample in range(len(lengths))]
    result = rollout(work(lengths), curves(slots=1), places, engines, on_demand=True)
    free = [0.0] * engines
    expected = []
    for length in lengths:
        expected.append(heapq.heappop(free) + length)
        heapq.heappush(free, expected[-1])
    assert result.finished_at.tolist() == pytest.approx(expected)


def test_nothing_is_planned_while_samples_wait() -> None:
    policy = Scripted([])
    rollout(work([10, 10, 10]), curves(slots=1), [0, 0, 0], 1, policy, plan_seconds=7.0, on_demand=True)
    assert policy.seen[0].now == 21.0 and len(policy.seen[0].ids) == 1


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_a_migration_takes_its_copy_and_its_downtime(share: float) -> None:
    length, prompt, first, downtime, per_token = 100, 20, 10.0, 3.0, 0.1
    costs = curves(LINEAR, migration=MigrationTimes(downtime, per_token, share))
    policy = Scripted([Plan((Move(1, 1),))])
    result = rollout(work([length] * 2, prompt=prompt), costs, [0, 0], 2, policy, plan_seconds=first)
    copy = per_token * (prompt + first / 2)
    at_departure = (first + copy * (1 - share)) / 2  # tokens of each sample: a pair decodes at half a token a second
    stayed = first + copy + length - at_departure
    assert result.finished_at.tolist() == pytest.approx([stayed, stayed + downtime])
    assert (result.migrations, result.ended_on.tolist()) == (1, [0, 1])


def test_a_sample_that_ends_during_its_copy_stays_where_it_is() -> None:
    costs = curves(LINEAR, migration=MigrationTimes(1.0, 100.0, 0.5))
    policy = Scripted([Plan((Move(0, 1), Move(1, 1)))])  # the second waits for the first one's copy
    result = rollout(work([10, 20]), costs, [0, 0], 2, policy, plan_seconds=4.0)
    assert (result.migrations, result.overtaken, result.ended_on.tolist()) == (0, 2, [0, 0])
    # Ten tokens each: 4 s alone, the other 8 tokens at half the pace; then 10 more at 2 s a token while it is copied.
    assert result.finished_at.tolist() == pytest.approx([4 + 16 * 2, 4 + 16 * 2 + 10 * 2])


def test_a_waiting_sample_moves_for_nothing() -> None:
    costs = curves(slots=1, migration=MigrationTimes(50.0, 50.0, 0.5))
    result = rollout(work([10, 10]), costs, [0, 0], 2, Scripted([Plan((Move(1, 1),))]), plan_seconds=2.0)
    assert result.finished_at.tolist() == pytest.approx([10.0, 12.0])
    assert (result.migrations, result.handed_over) == (0, 1)


def test_what_cannot_be_moved_is_refused() -> None:
    costs = curves(migration=MigrationTimes(1.0, 1.0, 0.0))
    first = Plan((Move(0, 0), Move(0, 1), Move(0, 2), Move(1, 2)), freed=(2,))
    result = rollout(work([50, 50]), costs, [0, 0], 3, Scripted([first]))
    assert (result.migrations, result.refused) == (1, 3)


def test_all_devices_score_what_is_left_longest_first() -> None:
    costs = curves(scoring_seconds=0.5, scoring_start=4.0)
    result = rollout(work([10, 9, 8, 7, 6], prompt=10), costs, [0, 0, 1, 1, 2], 3, fused=False)
    # 20, 19 and 18 tokens go first; the one with 18 is done first and takes 17, then the one with 19 takes 16.
    assert result.makespan == 10.0
    assert result.makespan_with_scoring == pytest.approx(10 + 4 + 0.5 * (18 + 17))
    assert result.freed_device_seconds == pytest.approx((10 - 8) + (10 - 6))
    assert result.used_device_seconds == 0.0


def test_a_freed_engine_scores_samples_as_they_end() -> None:
    costs = curves(scoring_seconds=1.0, scoring_start=2.0)
    policy = Scripted([Plan(freed=(1,))])
    result = rollout(work([5, 12, 40, 8]), costs, [0, 0, 0, 1], 2, policy)
    # Engine 1 decodes until 8; then it starts (2 s), scores 6 tokens until 16, 9 until 25, 13 until 38; 41 are left for
    # 40 s, and engine 1, which need not start again, is the first to be free.
    assert result.makespan == 40.0
    assert result.freed_device_seconds == pytest.approx(40 - 8)
    assert result.used_device_seconds == pytest.approx(38 - 8)
    assert (result.fused_tasks, result.makespan_with_scoring) == (3, pytest.approx(40 + 41))


class Silly:
    """Moves and frees at random, in bounds and out of reason."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def begin(self) -> None:
        self._random = np.random.default_rng(self._seed)

    def plan(self, state: RolloutState) -> Plan:
        random, engines = self._random, len(state.engines)
        assert len(state.ids) == len(state.at) == len(state.movable) and (state.remaining >= 1).all()
        count = int(random.integers(0, 6))
        samples, targets = random.integers(0, len(state.ids), count), random.integers(0, engines, count)
        freed = random.integers(0, engines, int(random.random() < 0.1))
        moves = (Move(int(sample), int(target)) for sample, target in zip(samples, targets, strict=True))
        return Plan(tuple(moves), tuple(freed.tolist()))


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=40),
    members=st.integers(1, 4),
    engines=st.integers(1, 5),
    slots=st.integers(1, 6),
    times=st.tuples(st.floats(0.0, 3.0), st.floats(0.001, 0.2), st.floats(0.0, 0.9)),
    plan_seconds=st.floats(0.3, 5.0),
    on_demand=st.booleans(),
)
def test_the_books_balance_whatever_a_policy_does(
    seed: int,
    lengths: list[int],
    members: int,
    engines: int,
    slots: int,
    times: tuple[float, float, float],
    plan_seconds: float,
    on_demand: bool,
) -> None:
    curve = DecodeCurve((1, 2, 8), (0.05, 0.06, 0.2), (1e-4, 1e-4, 2e-4))
    costs = curves(
        curve, slots, prefill_seconds=0.5, scoring_seconds=0.003, scoring_start=0.5, migration=MigrationTimes(*times)
    )
    workload = work(lengths, members)
    places = np.random.default_rng(seed).integers(0, engines, len(lengths))
    recorder = Recorder(workload)
    result = make(workload, engines, costs, places, Silly(seed), recorder, plan_seconds, on_demand=on_demand).run()
    assert sorted(recorder.ended) == list(enumerate(lengths))
    assert result.decoded == pytest.approx(sum(lengths))
    assert result.makespan == result.finished_at.max() >= lower_bound(workload, engines, costs, curve) * (1 - 1e-9)
    assert max(result.used_device_seconds, result.freed_device_seconds) <= engines * result.makespan + 1e-9
    assert min(result.used_device_seconds, result.freed_device_seconds) >= 0.0
    scoring = sum(lengths) + len(lengths)
    assert result.makespan_with_scoring >= max(result.makespan, scoring * 0.003 / engines)
    assert ((result.ended_on >= 0) & (result.ended_on < engines)).all()
    live = result.live.at(np.linspace(0, result.makespan, 50).tolist())
    assert live.max() <= slots and (live[-1] == 0).all() and (live.sum(axis=1) <= len(lengths)).all()


def test_the_lower_bound_is_reached_where_nothing_varies() -> None:
    costs = curves(DecodeCurve((1, 4), (0.1, 0.25), (0.0, 0.0)), slots=4, prefill_seconds=0.01)
    for lengths, engines in (([50] * 16, 2), ([50], 2)):
        workload = work(lengths, members=len(lengths) // engines or 1, prompt=7)
        places = [sample * engines // len(lengths) for sample in range(len(lengths))]
        bound = lower_bound(workload, engines, costs, costs.plain)
        assert rollout(workload, costs, places, engines).makespan == pytest.approx(bound)


def test_the_same_run_again_gives_the_same_figures() -> None:
    costs = curves(LINEAR, 6, scoring_seconds=0.01, migration=MigrationTimes(1.0, 0.01, 0.3))
    workload = draw_workload(LENGTH_DISTRIBUTIONS["chat"], 96, 8, 5)
    places = start_places(workload, 4, "even").tolist()
    once, again, other = (rollout(workload, costs, places, 4, Silly(seed), 20.0) for seed in (1, 1, 2))
    assert once.migrations > 0 and once.finished_at.tolist() == again.finished_at.tolist() != other.finished_at.tolist()
    assert replace(once, finished_at=0, ended_on=0, live=0) == replace(again, finished_at=0, ended_on=0, live=0)


def test_states_tell_what_a_real_manager_knows() -> None:
    policy = Scripted([Plan((Move(0, 1),))])
    costs = curves(slots=2, migration=MigrationTimes(2.0, 0.5, 0.0), kv_tokens=77)
    rollout(work([10, 3, 5], members=3, prompt=4), costs, [0, 0, 0], 2, policy, plan_seconds=2.5)
    first, second = policy.seen[:2]
    assert (first.now, first.ids, first.generated.tolist()) == (2.5, ("0", "1", "2"), [2, 2, 0])
    assert (first.lengths.tolist(), first.remaining.tolist()) == ([6, 6, 4], [8, 1, 5])
    assert first.movable.all() and (first.engines[0].slots, first.engines[0].kv_tokens) == (2, 77)
    # The second sample has ended, the third begun in its place; the first is being copied.
    assert (second.ids, second.at.tolist(), second.movable.tolist()) == (("0", "2"), [1, 0], [False, True])
    assert second.generated.tolist() == [5, 2]


def test_policies_see_the_throughput_of_the_kv_at_hand() -> None:
    policy = Scripted([])
    curve = DecodeCurve((1, 2), (1.0, 1.5), (0.01, 0.005))
    rollout(work([10, 10], prompt=6), curves(curve, kv_tokens=1), [0, 0], 1, policy, plan_seconds=1.6)
    context = policy.seen[0].lengths.mean()
    assert policy.seen[0].engines[0].throughput.seconds == pytest.approx((1 + 0.01 * context, 1.5 + 0.01 * context))


def test_policies_learn_of_lengths_only_from_samples_that_ended() -> None:
    states = []
    for lengths in ([5, 40, 90], [5, 90, 30]):
        workload = replace(work(lengths, members=3), limit=200)
        policy = Scripted([])
        make(workload, 1, curves(), np.zeros(3, np.int64), policy, Learned(workload), plan_seconds=2.0).run()
        states.append([(s.ids, s.generated.tolist(), s.remaining.tolist()) for s in policy.seen if s.now < 30])
    assert len(states[0]) == 14 and states[0] == states[1]


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("start", ["even", "skewed"])
def test_every_mechanism_ends_all_samples_and_asks_for_nothing_impossible(name: str, start: str) -> None:
    law = LENGTH_DISTRIBUTIONS["reasoning"]
    workload, earlier = (draw_workload(law, 256, 8, seed) for seed in (0, 1))
    costs = roofline("h200-8b")
    result = run_mechanism(MECHANISMS[name], workload, 4, costs, start=start, plan_seconds=1.0, earlier=[earlier])
    assert result.decoded == pytest.approx(workload.lengths.sum())
    assert result.makespan == result.finished_at.max()
    assert result.refused == 0 and result.kv_peak <= costs.kv_tokens
    assert (result.fused_tasks > 0) == MECHANISMS[name].fuses


def test_reallocation_that_knows_the_lengths_mends_a_skewed_start() -> None:
    costs = curves(DecodeCurve((1, 64), (0.01, 0.64), (0.0, 0.0)), slots=64, migration=MigrationTimes(0.05, 1e-5, 0.1))
    workload = draw_workload(LENGTH_DISTRIBUTIONS["chat"], 128, 8, 0)  # an engine's time is the tokens that it decodes
    spans = [
        run_mechanism(MECHANISMS[name], workload, 2, costs, start="skewed", plan_seconds=0.25, earlier=None).makespan
        for name in ("static", "reallocation")
    ]
    sums = np.bincount(start_places(workload, 2, "skewed"), workload.lengths) * 0.01
    assert spans[0] == pytest.approx(sums.max())
    assert sums.mean() <= spans[1] <= 1.1 * sums.mean()


def test_an_even_start_keeps_groups_whole() -> None:
    workload = draw_workload(LENGTH_DISTRIBUTIONS["chat"], 96, 8, 0)
    places = start_places(workload, 4, "even")
    assert np.bincount(places).tolist() == [24] * 4
    assert all(len(set(places[workload.groups == group])) == 1 for group in range(12))


def test_a_skewed_start_has_the_longest_samples_on_one_engine() -> None:
    workload = draw_workload(LENGTH_DISTRIBUTIONS["reasoning"], 96, 8, 0)
    places = start_places(workload, 4, "skewed")
    assert workload.lengths[places == 0].min() >= workload.lengths[places != 0].max()
    counts = np.bincount(places, minlength=4)
    assert counts[0] == 24 and counts.sum() == 96 and np.ptp(counts[1:]) <= 8
    assert (start_places(workload, 1, "skewed") == 0).all()


def test_of_two_samples_that_end_together_while_they_are_moved_neither_is_copied_on() -> None:
    """Equal lengths end in one event: the copy that waits for the first one's must not begin."""
    costs = curves(migration=MigrationTimes(0.0, 1000.0, 0.1))  # no copy is ever done
    policy = Scripted([Plan((Move(0, 1), Move(1, 1)))])
    found = rollout(work([40, 40, 90, 90]), costs, [0, 0, 0, 0], 2, policy)
    assert (found.migrations, found.overtaken) == (0, 2)
    assert np.isfinite(found.finished_at).all()
