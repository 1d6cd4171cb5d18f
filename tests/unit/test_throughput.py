"""Throughput curves and the decay of engines, against a walk from one sample's end to the next."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel, StepCost
from rlhfspec_mega.planning.forecast import MARGIN, Forecast
from rlhfspec_mega.planning.modes import DRAFTED, RECALLED, ModeChoice
from rlhfspec_mega.planning.rollout_state import EngineState, Throughput
from rlhfspec_mega.planning.throughput import Decay, batch_seconds, decay_seconds, seconds_per_token, throughput_of
from rlhfspec_mega.types import BATCH_BUCKETS, DECODE_MODES, batch_bucket
from tests.synthetic_drafts import make_batch

tokens = st.floats(1.0, 500.0)


@st.composite
def curves(draw: st.DrawFn) -> Throughput:
    count = draw(st.integers(1, 5))
    steps = draw(st.lists(st.integers(1, 4), min_size=count - 1, max_size=count - 1))
    seconds = draw(st.lists(st.floats(0.01, 1.0), min_size=count, max_size=count))
    return Throughput(tuple(np.cumsum([1, *steps]).tolist()), tuple(sorted(seconds)))


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[tuple[EngineState, ...], np.ndarray, np.ndarray]:
    """Up to 3 engines and 9 samples, more than slots at times; engines and tokens of the samples."""
    count = draw(st.integers(1, 3))
    engines = tuple(EngineState(i, draw(st.integers(1, 6)), 10**6, draw(curves())) for i in range(count))
    at = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=9))
    remaining = draw(st.lists(st.one_of(tokens, st.sampled_from([10.0, 20.0])), min_size=len(at), max_size=len(at)))
    return engines, np.array(at), np.array(remaining)


def pace(curve: Throughput, slots: int, batch: int) -> float:
    """Seconds per token, from the definition: lines between points, the last one goes on, full slots are shared."""
    if batch > slots:
        return pace(curve, slots, slots) * batch / slots
    points = list(zip(curve.batches, curve.seconds, strict=True))
    for (x, y), (u, v) in pairwise(points):
        if batch <= u or u == curve.batches[-1]:
            return y + (v - y) * (batch - x) / (u - x)
    return points[0][1]


def walk(engine: EngineState, remaining: list[float]) -> list[float]:
    """When each sample ends, in order of `remaining`, from one end to the next."""
    left = dict(enumerate(remaining))
    ends, now = [0.0] * len(remaining), 0.0
    while left:
        first = min(left, key=lambda i: left[i])
        step = left[first]
        now += step * pace(engine.throughput, engine.slots, len(left))
        ends[first] = now
        del left[first]
        left = {i: tokens - step for i, tokens in left.items()}
    return ends


def last(engine: EngineState, remaining: list[float]) -> float:
    return max(walk(engine, remaining), default=0.0)


@given(curves(), st.integers(1, 8))
def test_curves_are_lines_between_points_and_beyond(curve: Throughput, slots: int) -> None:
    expected = [0.0, *(pace(curve, slots, batch) for batch in range(1, 20))]
    assert np.allclose(batch_seconds(curve, slots, 19), expected)
    assert np.allclose(seconds_per_token(curve, np.arange(1, slots + 1)), expected[1 : slots + 1])


@given(curves(), st.lists(tokens, max_size=10), st.integers(1, 8))
def test_decay_is_that_of_a_shrinking_batch(curve: Throughput, remaining: list[float], slots: int) -> None:
    assert decay_seconds(curve, np.array(remaining), slots) == pytest.approx(
        last(EngineState(0, slots, 1, curve), remaining)
    )


@settings(deadline=None)
@given(rollouts(), st.randoms(use_true_random=False))
def test_decay_stays_right_as_samples_are_removed_and_inserted(rollout, random) -> None:
    engines, at, remaining = rollout
    at = at.copy()
    decay = Decay(engines, at, remaining, np.arange(len(at)), spare=len(at))
    for _ in range(5):
        source, destination = random.randrange(len(engines)), random.randrange(len(engines))
        if source != destination and decay.counts[source]:
            column = np.array([random.randrange(int(decay.counts[source]))])
            moved = decay.remove(np.array([source]), column)
            decay.insert(np.array([destination]), moved)
            at[moved] = destination
    held = [[float(t) for t in remaining[at == i]] for i in range(len(engines))]
    assert np.allclose(decay.finish, [last(e, here) for e, here in zip(engines, held, strict=True)])
    assert decay.counts.tolist() == [len(here) for here in held]
    for i, engine in enumerate(engines):
        row = decay.remaining[i, : decay.counts[i]]
        assert row.tolist() == sorted(held[i], reverse=True)
        assert sorted(decay.samples[i, : decay.counts[i]].tolist()) == np.flatnonzero(at == i).tolist()
        for column, gone in enumerate(row.tolist()):
            rest = [*row.tolist()]
            rest.remove(gone)
            assert decay.finish_without[i, column] == pytest.approx(last(engine, rest))
        more = np.array([[5.0, 20.0, 333.0]])
        expected = [last(engine, [*held[i], t]) for t in more[0].tolist()]
        assert np.allclose(decay.finish_with(np.array([i]), more), [expected])


@settings(deadline=None)
@given(rollouts())
def test_exchange_of_two_samples(rollout) -> None:
    engines, at, remaining = rollout
    decay = Decay(engines, at, remaining, np.arange(len(at)), spare=1)
    one = int(decay.counts.argmax())
    columns = np.arange(decay.counts[one])
    for other in range(len(engines)):
        if other == one or not decay.counts[other]:
            continue
        theirs = np.arange(decay.counts[other])
        first, second = decay.finish_exchanged(one, columns, np.array([other]), theirs[None])
        for i, longer in enumerate(decay.remaining[one, columns].tolist()):
            for k, shorter in enumerate(decay.remaining[other, theirs].tolist()):
                if longer > shorter:
                    mine, its = remaining[at == one].tolist(), remaining[at == other].tolist()
                    mine.remove(longer)
                    its.remove(shorter)
                    assert first[0, i, k] == pytest.approx(last(engines[one], [*mine, shorter]))
                    assert second[0, i, k] == pytest.approx(last(engines[other], [*its, longer]))


@settings(deadline=None)
@given(rollouts(), st.floats(0.0, 1.2))
def test_ends_and_progress_on_the_way(rollout, share: float) -> None:
    engines, at, remaining = rollout
    decay = Decay(engines, at, remaining, np.arange(len(at)), spare=1)
    ends = decay.ends()
    seconds = share * float(ends.max()) + 1e-6
    progress = decay.progress(ends, seconds)
    for i, engine in enumerate(engines):
        held = sorted(remaining[at == i].tolist(), reverse=True)
        expected = walk(engine, held)
        assert np.allclose(ends[i, : len(held)], expected)
        left = [t - progress[i] for t, end in zip(held, expected, strict=True) if end > seconds]
        if left and min(left) > 1e-3:  # what is left then takes the rest of the time
            assert last(engine, left) + seconds == pytest.approx(max(expected), rel=1e-6)


@given(rollouts())
def test_no_assignment_beats_the_least_makespan(rollout) -> None:
    engines, at, remaining = rollout
    bound = Decay(engines, at, remaining, np.arange(len(at)), spare=len(at)).least_makespan()
    ends = [last(e, remaining[at == i].tolist()) for i, e in enumerate(engines)]
    assert bound <= max(ends) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("batches", "seconds"),
    [((), ()), ((1, 2), (0.1,)), ((2, 4), (0.1, 0.2)), ((1, 1), (0.1, 0.2)), ((1,), (0.0,)), ((1,), (float("nan"),))],
)
def test_bad_curves_are_refused_in_a_sentence(batches: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(UserError, match="throughput curve"):
        seconds_per_token(Throughput(batches, seconds), np.array([1]))


def machine(floor: float, per_token: float) -> CostModel:
    steps = [
        StepCost(b, 0, b * (1 + n), b, min(n, 1), 0, 1e-3, floor + per_token * b * (1 + n))
        for b in (1, 2, 4, 8, 16)
        for n in (0, 1, 3)
    ]
    model = CostModel(frozen=True)
    model.fit(steps)
    return model


def test_a_plain_engine_s_curve_is_the_cost_of_its_steps() -> None:
    cost = machine(1e-2, 1e-3)
    curve = throughput_of(cost, None, slots=12, length=100)
    assert curve.batches == (1, 2, 4, 8, 12)
    expected = [float(cost.verify_seconds(b, 100 * b, b)) for b in curve.batches]
    assert curve.seconds == pytest.approx(expected)


@pytest.mark.parametrize("floor, per_token, pays", [(1e-1, 1e-6, True), (1e-6, 1e-2, False)])
def test_a_drafting_engine_s_curve_is_the_better_of_drafting_and_not(
    floor: float, per_token: float, pays: bool
) -> None:
    cost, acceptance = machine(floor, per_token), AcceptanceModel()
    curve = throughput_of(cost, acceptance, slots=4, length=100, width=2, depth=3, max_nodes=4)
    for size, seconds in zip(curve.batches, curve.seconds, strict=True):
        plain = size / float(cost.verify_seconds(size, 100 * size, size))
        expected = Forecast(acceptance, 2, 3).for_batch(make_batch(size, np.random.default_rng(0)))
        best = 0.0
        for depth in (1, 2, 3):
            rows = zip(
                expected.nodes[depth - 1], expected.accepted[depth - 1], expected.drafted[depth - 1], strict=True
            )
            for nodes, accepted, drafted in rows:
                if nodes <= 4:
                    step = float(cost.draft_seconds(size, 100 * size, size, depth, size * drafted))
                    step += float(cost.verify_seconds(size, 100 * size, size * (1 + nodes)))
                    best = max(best, size * (1 + accepted) / step)
        assert (best > MARGIN * plain) == pays
        assert seconds == pytest.approx(size / (best if pays else plain))


@pytest.mark.parametrize(("recalled", "drafted"), [(0.7, 0.5), (1.5, 0.5), (0.7, 2.5), (1.5, 2.5)])
def test_gains_that_were_measured_count_instead_of_forecasts(recalled: float, drafted: float) -> None:
    """At the batch sizes at which they were; elsewhere history is taken to give what it gives in the mean."""
    cost, acceptance = machine(1e-1, 1e-6), AcceptanceModel()
    given: dict[str, Any] = {"slots": 8, "length": 100, "width": 2, "depth": 3, "max_nodes": 4}
    modes = ModeChoice(acceptance, cost, 2, 3, 4, fixed_depth=False)
    measured = np.zeros((BATCH_BUCKETS, len(DECODE_MODES), 2))
    measured[batch_bucket(4), RECALLED] = 100.0 * recalled, 100.0
    measured[batch_bucket(4), DRAFTED] = 100.0 * drafted, 100.0
    overall = np.zeros((len(DECODE_MODES), 2))
    overall[RECALLED] = 1e6 * recalled, 1e6
    kept = np.ones(2)
    modes.load_state_dict(modes.state_dict() | {"measured": measured, "overall": overall, "kept": kept})
    plain = throughput_of(cost, None, **given)
    forecast = throughput_of(cost, acceptance, **given)
    found = throughput_of(cost, acceptance, modes=modes, **given)
    without_draft = throughput_of(cost, None, modes=modes, **given)
    gains = np.array(plain.seconds) / np.array(found.seconds)
    assert plain.batches == (1, 2, 4, 8)
    assert gains[2] == pytest.approx(max(1.0, recalled, drafted))
    rest = [0, 1, 3]
    assert gains[rest] == pytest.approx((np.array(plain.seconds) / np.array(forecast.seconds))[rest]), (
        "drafting is best"
    )
    assert np.array(plain.seconds) / np.array(without_draft.seconds) == pytest.approx(max(1.0, recalled), rel=1e-4)
