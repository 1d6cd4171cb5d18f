"""Consolidation of the long tail: allowed, worth it, and at the right moment; and the policy that holds it all."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfspec_mega.planning.reallocation import Reallocator
from rlhfspec_mega.planning.rollout_state import (
    EngineState,
    MigrationCost,
    Move,
    Plan,
    RolloutPolicy,
    RolloutState,
    Throughput,
)
from rlhfspec_mega.planning.tail import Consolidator, TailPolicy
from tests.exact_makespan import drained, end_of, makespan

COST, TOLERANCE, TICK = MigrationCost(0.02, 1e-6), 0.03, 0.1
BATCHES = tuple(range(1, 65))
CURVE = Throughput(BATCHES, tuple(0.01 * max(1.0, batch / 6) for batch in BATCHES))  # a knee at 6 samples


def state_of(
    at: list[int], remaining: list[float], engines: int, slots: int = 64, kv_tokens: int = 10**6, now: float = 0.0
) -> RolloutState:
    count = len(at)
    return RolloutState(
        now=now,
        engines=tuple(EngineState(rank, slots, kv_tokens, CURVE) for rank in range(engines)),
        ids=tuple(f"s{i}" for i in range(count)),
        at=np.array(at, np.int64),
        groups=np.zeros(count, np.int64),
        generated=np.full(count, 50),
        lengths=np.full(count, 100),
        remaining=np.array(remaining, np.float64),
        movable=np.ones(count, np.bool_),
    )


def begun(samples: int, seconds: float) -> Consolidator:
    """A consolidator that has seen a rollout begin, of so many samples whose inference tasks take so long in all."""
    consolidator = Consolidator(COST, tolerance=TOLERANCE)
    consolidator.observe(samples, seconds)
    return consolidator


def test_a_tail_below_the_knee_goes_to_one_engine() -> None:
    state = state_of([0, 1, 2, 3], [2000.0, 1900.0, 1950.0, 1800.0], engines=4)
    plan = begun(100, 100.0).plan(state, (), 100.0)
    assert plan is not None and plan.freed == (1, 2, 3)
    assert sorted(plan.moves, key=lambda move: move.sample) == [Move(1, 0), Move(2, 0), Move(3, 0)]


@pytest.mark.parametrize("kv_tokens, slots, kept", [(10**6, 2, 2), (4500, 64, 2), (10**6, 1, 4), (2200, 64, 4)])
def test_slots_and_kv_ask_for_more_engines(kv_tokens: int, slots: int, kept: int) -> None:
    state = state_of([0, 1, 2, 3], [2000.0, 1900.0, 1950.0, 1800.0], 4, slots, kv_tokens)
    plan = begun(100, 100.0).plan(state, (), 100.0)
    assert len(plan.freed if plan else ()) == 4 - kept


def test_without_work_for_the_freed_nothing_is_packed() -> None:
    state = state_of([0, 1, 2, 3], [2000.0, 1900.0, 1950.0, 1800.0], engines=4)
    assert begun(100, 100.0).plan(state, (), 0.0) is None


def test_little_work_frees_few_engines() -> None:
    """As much as one engine can do while the tail lasts: no more are emptied."""
    state = state_of([0, 1, 2, 3], [2000.0, 1900.0, 1950.0, 1800.0], engines=4)
    plan = begun(400, 15.0).plan(state, (), 15.0)
    assert plan is not None and len(plan.freed) == 1


def test_full_engines_are_left_as_they_are() -> None:
    """Above the knee any packing makes the rollout longer."""
    state = state_of(sorted([0, 1, 2, 3] * 24), [1000.0] * 96, engines=4)
    assert begun(200, 100.0).plan(state, (), 100.0) is None


def test_samples_that_cannot_move_keep_their_engine() -> None:
    state = state_of([0, 1, 2, 3], [2000.0, 1700.0, 1950.0, 1800.0], engines=4)
    state = replace(state, movable=np.array([True, False, True, True]))
    plan = begun(100, 100.0).plan(state, (), 100.0)
    assert plan is not None and 1 not in plan.freed


@st.composite
def tails(draw: st.DrawFn) -> tuple[RolloutState, tuple[int, ...]]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    engines = draw(st.integers(2, 6))
    count = draw(st.integers(1, 20))
    at = rng.integers(0, engines, count)
    state = state_of(at.tolist(), np.exp(rng.normal(6.0, 1.0, count)).tolist(), engines)
    fleet = tuple(
        replace(engine, slots=int(rng.integers(4, 20)), kv_tokens=int(rng.integers(4000, 40000)))
        for engine in state.engines
    )
    freed = tuple(np.flatnonzero(rng.random(engines) < 0.2).tolist())
    generated = rng.integers(0, 400, count)
    movable = rng.random(count) < 0.9
    return replace(state, engines=fleet, generated=generated, lengths=generated + 20, movable=movable), freed


@settings(deadline=None)
@given(tails(), st.floats(0.0, 500.0))
def test_packing_empties_what_it_frees_and_delays_nothing(
    case: tuple[RolloutState, tuple[int, ...]], seconds: float
) -> None:
    state, freed = case
    engines = len(state.engines)
    plan = begun(200, seconds).plan(state, freed, seconds)
    assert plan == begun(200, seconds).plan(state, freed, seconds)
    if plan is None:
        return
    to = state.at.copy()
    for move in plan.moves:
        assert state.movable[move.sample]
        assert state.at[move.sample] in plan.freed and state.at[move.sample] not in freed
        to[move.sample] = move.destination
    assert set(freed) < set(plan.freed) and len(plan.freed) < engines
    assert not np.isin(to, [i for i in plan.freed if i not in freed]).any()
    kept = [i for i in range(engines) if i not in plan.freed]
    open_before = [i for i in range(engines) if i not in freed]
    nothing = [end_of(state, COST, i, np.flatnonzero(state.at == i).tolist()) for i in open_before]
    packed = [end_of(state, COST, i, np.flatnonzero(to == i).tolist()) for i in kept]  # inf where it does not fit
    assert max(packed) <= (1.0 + TOLERANCE) * max(nothing) + 1e-9


class Fixed:
    """Packs once, onto so many engines, when so many samples are unfinished: what the policy is to be as good as."""

    def __init__(self, unfinished: int, kept: int) -> None:
        self._unfinished, self._kept = unfinished, kept

    def begin(self) -> None:
        self._freed: tuple[int, ...] = ()

    def plan(self, state: RolloutState) -> Plan:
        if self._freed or len(state.ids) > self._unfinished:
            return Plan((), self._freed)
        work = np.bincount(state.at, state.remaining, len(state.engines))
        kept = np.argsort(-work, kind="stable")[: self._kept].tolist()
        held = {e: state.remaining[state.at == e].tolist() for e in kept}
        moves = []
        for i in np.argsort(-state.remaining, kind="stable").tolist():
            if state.at[i] not in kept:
                best = min(kept, key=lambda e: drained(state.engines[e], [*held[e], state.remaining[i]]))
                held[best].append(float(state.remaining[i]))
                moves.append(Move(i, best))
        self._freed = tuple(set(range(len(state.engines))) - set(kept))
        return Plan(tuple(moves), self._freed)


class Static:
    """Samples stay where they are."""

    def begin(self) -> None:
        """Nothing to forget."""

    def plan(self, state: RolloutState) -> Plan:
        """Never moves anything."""
        return Plan()


class Fluid:
    """A rollout in which the policy knows the lengths: all samples of an engine gain tokens at the curve's pace.

    Attributes:
        left: device-seconds of inference work; a sample's share is ready when it has ended.
    """

    def __init__(self, lengths: np.ndarray, at: np.ndarray, engines: int, work: float) -> None:
        self._lengths, self._at, self._engines, self._work = lengths, at, engines, work
        self.left = work

    def run(self, policy: RolloutPolicy) -> tuple[float, float]:
        """Seconds until the rollout ends, and until the work is done too, by all devices after the rollout."""
        now, at, left = 0.0, self._at.copy(), self._lengths.copy()
        paces = np.append(np.inf, CURVE.seconds)
        policy.begin()
        while (left > 0).any():
            live = np.flatnonzero(left > 0)
            state = state_of(at[live].tolist(), np.maximum(left[live], 1.0).tolist(), self._engines, now=now)
            state = replace(state, ids=tuple(str(i) for i in live))
            plan = policy.plan(state)
            for move in plan.moves:
                at[live[move.sample]] = move.destination
                left[live[move.sample]] += COST.downtime / paces[1]
            held = np.bincount(at[live], minlength=self._engines)
            left[live] -= TICK / paces[held[at[live]]]
            ready = self._work * (1.0 - len(live) / len(left)) - (self._work - self.left)
            idle = sum(1 for engine in plan.freed if held[engine] == 0)
            self.left -= min(idle * TICK, max(ready, 0.0))
            now += TICK
        return now, now + self.left / self._engines


@pytest.mark.parametrize("seed, work", [(0, 60.0), (1, 20.0), (2, 150.0)])
def test_as_good_as_the_best_fixed_moment_and_number(seed: int, work: float) -> None:
    """Against every R_t and m that does not delay the rollout beyond the tolerance, each tried to the end."""
    rng = np.random.default_rng(seed)
    lengths, at = np.exp(rng.normal(6.0, 0.9, 32)), np.arange(32) % 4
    end, nothing = Fluid(lengths, at, 4, work).run(Static())
    best = nothing
    for unfinished in range(2, 33, 2):
        for kept in (1, 2, 3):
            fixed_end, total = Fluid(lengths, at, 4, work).run(Fixed(unfinished, kept))
            if fixed_end <= (1.0 + TOLERANCE) * end:
                best = min(best, total)
    fluid = Fluid(lengths, at, 4, work)
    own_end, own = fluid.run(TailPolicy(None, Consolidator(COST, tolerance=TOLERANCE), lambda: fluid.left))
    print(f"static {nothing:.1f}, best fixed {best:.1f}, chosen {own:.1f}; rollout {end:.1f} and {own_end:.1f}")
    assert own_end <= (1.0 + TOLERANCE) * end + 2 * TICK
    assert nothing - own >= 0.85 * (nothing - best)
    assert nothing - best > 0.1 * work / 4  # there was something to gain


def test_reallocation_comes_first_and_never_to_freed_engines() -> None:
    """Skewed long samples are spread; once that is done the tail is packed, and stays so."""
    rng = np.random.default_rng(0)
    lengths = np.sort(np.exp(rng.normal(6.0, 1.0, 48)))
    at = np.arange(48) // 12
    static_end, static_total = Fluid(lengths, at, 4, 60.0).run(Static())
    fluid = Fluid(lengths, at, 4, 60.0)
    policy = TailPolicy(Reallocator(COST), Consolidator(COST), lambda: fluid.left)
    plans: list[Plan] = []

    class Recorded:
        def begin(self) -> None:
            policy.begin()

        def plan(self, state: RolloutState) -> Plan:
            plans.append(policy.plan(state))
            assert not np.isin(state.at, plans[-2].freed if len(plans) > 1 else ()).any()
            return plans[-1]

    end, total = fluid.run(Recorded())
    assert end < 0.9 * static_end and total < 0.8 * static_total
    assert plans[0].moves and not plans[0].freed
    assert plans[-1].freed
    for before, after in pairwise(plans):
        assert set(before.freed) <= set(after.freed)
        assert not {move.destination for move in after.moves} & set(after.freed)


def test_freed_engines_are_known_by_rank_and_come_back_when_alone() -> None:
    policy = TailPolicy(None, Consolidator(COST), lambda: 100.0)
    policy.begin()
    policy.plan(state_of((np.arange(100) % 4).tolist(), [1000.0] * 100, 4))
    state = state_of([0, 1, 2, 3], [1900.0, 1800.0, 1950.0, 2000.0], 4)
    assert policy.plan(state).freed == (0, 1, 2)
    moved = replace(state, at=np.full(4, 3))
    assert policy.plan(moved).freed == (0, 1, 2)
    engines = state.engines[1:]  # the engine of rank 0 died: all others are one index earlier
    assert policy.plan(replace(moved, engines=engines, at=np.full(4, 2))).freed == (0, 1)
    alone = replace(moved, engines=state.engines[:1], at=np.zeros(4, np.int64))  # only a freed one is left
    assert policy.plan(alone).freed == ()


def test_a_freed_engine_that_has_samples_all_the_same_takes_part_again() -> None:
    """Its move came to nothing, or it was given those of an engine that died."""
    policy = TailPolicy(None, Consolidator(COST), lambda: 100.0)
    policy.begin()
    policy.plan(state_of((np.arange(100) % 4).tolist(), [1000.0] * 100, 4))
    state = state_of([0, 1, 2, 3], [1900.0, 1800.0, 1950.0, 2000.0], 4)
    assert policy.plan(state).freed == (0, 1, 2)
    fixed = replace(state, at=np.array([1, 3, 3, 3]), movable=np.array([False, True, True, True]))
    plan = policy.plan(fixed)
    assert 1 not in plan.freed and {move.destination for move in plan.moves} <= {1}


def test_switched_off_it_does_nothing() -> None:
    state = state_of([0] * 16, [500.0] * 16, 4)
    assert TailPolicy(None).plan(state) == Plan()
    assert makespan(state, COST, state.at.tolist()) > 1.5 * makespan(state, COST, (np.arange(16) % 4).tolist())
    assert TailPolicy(Reallocator(COST)).plan(state).moves
