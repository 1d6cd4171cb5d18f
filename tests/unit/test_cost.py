"""The cost model against synthetic machines: fit, drift, outliers, monotony, bounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfspec_mega.planning.cost import CostModel, StepCost

Machine = Callable[[int, int, int], float]


def cpu(batch: int, kv: int, tokens: int) -> float:
    return 5e-3 + 6e-4 * tokens + 2e-4 * batch + 3e-8 * kv + (1e-3 if tokens > batch else 0.0)


def gpu_knee(batch: int, kv: int, tokens: int) -> float:
    """Weight reading is the floor up to 128 tokens, then arithmetic."""
    return 8e-3 + max(0, tokens - 128) * 6e-5 + 2e-8 * kv + 1e-5 * batch


def gpu_steps(batch: int, kv: int, tokens: int) -> float:
    """As `gpu_knee`, in tiles of 64 tokens."""
    return gpu_knee(batch, kv, -(-tokens // 64) * 64)


def host(batch: int, kv: int, tokens: int) -> float:
    """As `cpu`, with attention that takes time for each pair of a token and one in its sample's KV."""
    return cpu(batch, kv, tokens) + 2e-6 * tokens * kv / batch


def draft(batch: int, kv: int, backlog: int, depth: int, drafted: int) -> float:
    return 1.5e-3 + 1e-4 * batch + 4e-5 * (backlog - batch) + (depth - 1) * 1e-3 + 1e-4 * drafted + 1e-9 * kv * depth


def profile(machine: Machine, noise: float, rng: np.random.Generator) -> list[StepCost]:
    """What a warm-up would measure: batches by powers of two, equal trees."""
    steps = []
    for batch in (1, 2, 4, 8, 16, 32):
        for extra in (0, 1, 2, 4, 8, 15):
            for length in (100, 400):
                steps.append(step(machine, batch, extra, length, noise, rng))
    return steps


def step(
    machine: Machine, batch: int, extra: int, length: int, noise: float, rng: np.random.Generator, slow: float = 1.0
) -> StepCost:
    kv, tokens, depth = batch * length, batch * (1 + extra), min(extra, 8)
    backlog, drafted = int(batch * rng.integers(1, 9)), int(batch * rng.integers(1, 4)) * max(depth - 1, 0)
    times = slow * rng.lognormal(0.0, noise, 2)
    draft_seconds = float(times[0]) * draft(batch, kv, backlog, depth, drafted) if depth else 0.0
    verify = float(times[1]) * machine(batch, kv, tokens)
    return StepCost(batch, kv, tokens, backlog, depth, drafted, draft_seconds, verify)


def errors(model: CostModel, machine: Machine, rng: np.random.Generator, factor: float = 1.0) -> tuple[float, float]:
    """Median relative errors of verify and draft over random steps."""
    verify, drafts = [], []
    for _ in range(400):
        s = step(machine, int(rng.integers(1, 33)), int(rng.integers(1, 16)), int(rng.integers(50, 500)), 0.0, rng)
        predicted = float(model.verify_seconds(s.batch, s.kv_tokens, s.tokens))
        verify.append(abs(predicted / (factor * s.verify_seconds) - 1))
        predicted = float(model.draft_seconds(s.batch, s.kv_tokens, s.backlog, s.depth, s.drafted))
        drafts.append(abs(predicted / (factor * s.draft_seconds) - 1))
    return float(np.median(verify)), float(np.median(drafts))


def random_step(machine: Machine, rng: np.random.Generator, slow: float = 1.0, noise: float = 0.05) -> StepCost:
    return step(
        machine, int(rng.integers(1, 33)), int(rng.integers(0, 16)), int(rng.integers(50, 500)), noise, rng, slow
    )


@pytest.mark.parametrize(("machine", "most"), [(cpu, 0.03), (gpu_knee, 0.04), (gpu_steps, 0.12)])
def test_a_profile_fits_machines_of_every_kind(machine: Machine, most: float) -> None:
    rng = np.random.default_rng(0)
    model = CostModel()
    model.fit(profile(machine, 0.03, rng))
    verify, drafts = errors(model, machine, rng)
    assert verify < most and drafts < 0.06


def test_knots_at_both_sides_of_a_step_meet_it() -> None:
    rng = np.random.default_rng(0)
    edges = [1, *(edge for k in range(128, 512, 64) for edge in (k, k + 1)), 512]
    model = CostModel(verify_knots=edges)
    for _ in range(3000):
        model.observe(random_step(gpu_steps, rng))
    assert errors(model, gpu_steps, rng)[0] < 0.04
    at, after = model.verify_seconds(8, 800, np.array([192.0, 193.0]))
    assert after / at > 1.15  # 3.8 ms more on 12 ms


def test_the_plain_step_has_its_own_price() -> None:
    """A mask and a compaction cost the same however few the draft tokens: 1 ms here."""
    rng = np.random.default_rng(1)
    model = CostModel()
    model.fit(profile(cpu, 0.0, rng))
    plain, one = model.verify_seconds(4, 800, np.array([4.0, 5.0]))
    assert one - plain == pytest.approx(1.6e-3, rel=0.15)


def test_each_token_meets_the_kv_of_its_sample() -> None:
    rng = np.random.default_rng(8)
    model = CostModel()
    model.fit(profile(host, 0.0, rng))
    for batch, extra, length in ((32, 1, 50), (32, 1, 450), (4, 12, 50), (4, 12, 450), (1, 15, 250)):
        kv, tokens = batch * length, batch * (1 + extra)
        expected = pytest.approx(host(batch, kv, tokens), rel=0.05)
        assert float(model.verify_seconds(batch, kv, tokens)) == expected
        assert model.verify_seconds_up_to(batch, kv, tokens - batch + 1)[-1] == expected


def test_without_a_profile_steps_alone_teach_it() -> None:
    rng = np.random.default_rng(2)
    model = CostModel()
    for _ in range(400):
        model.observe(random_step(gpu_knee, rng))
    assert max(errors(model, gpu_knee, rng)) < 0.05


def test_outliers_are_ignored_and_a_lasting_change_is_not() -> None:
    rng = np.random.default_rng(3)
    model = CostModel()
    model.fit(profile(cpu, 0.03, rng))
    for _ in range(500):
        model.observe(random_step(cpu, rng, slow=10.0 if rng.random() < 0.03 else 1.0))
    assert max(errors(model, cpu, rng)) < 0.06
    for _ in range(150):
        model.observe(random_step(cpu, rng, slow=2.0))
    assert max(errors(model, cpu, rng, factor=2.0)) < 0.06


def test_a_slower_machine_seen_at_small_batches_is_slower_at_large_ones() -> None:
    rng = np.random.default_rng(4)
    model = CostModel()
    model.fit(profile(cpu, 0.03, rng))
    for _ in range(200):
        model.observe(step(cpu, int(rng.integers(1, 5)), int(rng.integers(0, 4)), 200, 0.05, rng, slow=1.5))
    assert errors(model, cpu, rng, factor=1.5)[0] < 0.1


def test_plain_steps_that_are_not_seen_follow_the_machine() -> None:
    rng = np.random.default_rng(6)
    model = CostModel()
    model.fit(profile(cpu, 0.03, rng))
    for _ in range(200):
        model.observe(step(cpu, int(rng.integers(1, 9)), int(rng.integers(1, 8)), 200, 0.05, rng, slow=1.5))
    for batch in (1, 8, 24):
        assert model.plain_seconds(batch, 200 * batch) == pytest.approx(1.5 * cpu(batch, 200 * batch, batch), rel=0.15)


def test_a_step_whose_draft_tokens_were_all_dropped_is_no_plain_step() -> None:
    """It verifies one token per sample, as a plain step does, and takes longer: 2 ms here."""
    rng = np.random.default_rng(7)
    model = CostModel()
    model.fit(profile(cpu, 0.03, rng))
    for at in range(400):
        plain = step(cpu, 4, 0, 200, 0.03, rng)
        dropped = replace(plain, depth=4, drafted=16, draft_seconds=5e-3, verify_seconds=plain.verify_seconds + 2e-3)
        model.observe(dropped if at % 2 else plain)
    assert model.plain_seconds(4, 800) == pytest.approx(cpu(4, 800, 4), rel=0.05)


def test_the_covariance_does_not_wind_up_at_one_size() -> None:
    """Twenty thousand steps of one size change what is known about others by the common factor only."""
    rng = np.random.default_rng(5)
    model = CostModel()
    model.fit(profile(cpu, 0.02, rng))
    before = np.array(model.state_dict()["verify"]["covariance"])
    for _ in range(20_000):
        model.observe(StepCost(4, 800, 12, 8, 0, 0, 0.0, cpu(4, 800, 12) * float(rng.lognormal(0, 0.05))))
    after = np.array(model.state_dict()["verify"]["covariance"])
    assert np.linalg.eigvalsh(after).min() > 0
    assert after.diagonal().max() <= 1.01 * before.diagonal().max()
    assert errors(model, cpu, rng)[0] < 0.06
    model.observe(StepCost(32, 6400, 300, 8, 0, 0, 0.0, 1.3 * cpu(32, 6400, 300)))
    predicted = float(model.verify_seconds(4, 800, 12))
    assert predicted == pytest.approx(cpu(4, 800, 12), rel=0.1)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.integers(0, 20), st.floats(1e-5, 10.0), st.integers(0, 8)),
        min_size=1,
        max_size=30,
    ),
    st.booleans(),
)
def test_predictions_are_positive_and_never_fall_whatever_was_measured(
    seen: list[tuple[int, int, float, int]], fitted: bool
) -> None:
    steps = [StepCost(b, 50 * b, b * (1 + n), 2 * b, d, b * max(d - 1, 0), t / 3, t) for b, n, t, d in seen]
    model = CostModel()
    if fitted:
        model.fit(steps)
    for each in steps:
        model.observe(each)
    for batch in (1, 7, 64):
        verify = model.verify_seconds(batch, 50 * batch, np.arange(batch, 3000.0))
        assert (verify > 0).all() and (np.diff(verify) >= -1e-12 * verify.max()).all()
        drafts = model.draft_seconds(batch, 50 * batch, 2 * batch, np.arange(1, 12), np.arange(11) * batch)
        assert (drafts > 0).all() and (np.diff(drafts) >= -1e-12 * drafts.max()).all()
        assert float(model.draft_seconds(batch, 50, batch, 0, 0)) == 0.0
        assert model.draft_seconds_scalar(batch, 50, batch, 0, 0) == 0.0
        one_by_one = [
            model.draft_seconds_scalar(batch, 50 * batch, 2 * batch, d, (d - 1) * batch) for d in range(1, 12)
        ]
        assert one_by_one == pytest.approx(drafts)


def test_state_goes_through_json() -> None:
    rng = np.random.default_rng(6)
    first, second = CostModel(verify_knots=[1, 10, 100]), CostModel()
    first.fit(profile(cpu, 0.03, rng))
    first.observe(random_step(cpu, rng))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for _ in range(5):
        observed = random_step(cpu, rng)
        first.observe(observed)
        second.observe(observed)
    assert first.state_dict() == second.state_dict()
    tokens = np.arange(1.0, 200.0)
    assert (first.verify_seconds(3, 90, tokens) == second.verify_seconds(3, 90, tokens)).all()


def test_a_nominal_model_is_frozen_and_grows_with_the_models() -> None:
    rng = np.random.default_rng(7)
    model, larger = CostModel.nominal(14_000_000, 3_000_000), CostModel.nominal(28_000_000, 3_000_000)
    before = model.state_dict()
    for _ in range(20):
        model.observe(random_step(cpu, rng))
    assert model.state_dict() == before == CostModel.nominal(14_000_000, 3_000_000).state_dict()
    one, eight = model.verify_seconds(1, 100, np.array([1.0, 8.0]))
    assert 1.35 < eight / one < 2.1  # what fp32 costs on a CPU core
    assert float(larger.verify_seconds(1, 100, 8)) > 1.8 * eight
    assert float(model.draft_seconds(1, 100, 1, 1, 0)) < 0.3 * one


def test_an_empty_profile_is_refused() -> None:
    with pytest.raises(ValueError, match="no measurements"):
        CostModel().fit([])


def test_a_profile_whose_backlog_is_its_batch_tells_drafting_apart() -> None:
    """Made-up samples bring one unread token each, so nothing but the curve may explain what a first pass takes."""
    measured = []
    for batch in (1, 2, 4, 8, 16, 32):
        for depth, drafted in ((1, 0), (3, 1), (6, 1), (4, 3)):
            nodes = batch * drafted * (depth - 1)
            seconds = 3e-3 + 2e-4 * batch + (depth - 1) * 2.5e-3 + 1.5e-4 * nodes
            measured.append(StepCost(batch, 100 * batch, 2 * batch, batch, depth, nodes, seconds, 1e-2 + 1e-3 * batch))
    model = CostModel()
    model.fit(measured)
    for step in measured:
        predicted = model.draft_seconds_scalar(step.batch, step.kv_tokens, step.backlog, step.depth, step.drafted)
        assert predicted == pytest.approx(step.draft_seconds, rel=0.25)
    unread = [model.draft_seconds_scalar(8, 800, backlog, 1, 0) for backlog in (8, 16, 32)]
    assert unread == pytest.approx([4.6e-3, 6.2e-3, 9.4e-3], rel=0.25), "further tokens cost as samples do"
    # A token that was accepted in one of them says next to nothing, nor does the first step of a run.
    model.fit([*measured, replace(measured[8], backlog=measured[8].backlog + 1)])
    model.observe(StepCost(4, 400, 8, 5, 1, 0, 1.08 * 4e-3, 1.4e-2))
    assert model.draft_seconds_scalar(16, 1600, 516, 1, 0) == pytest.approx(6.2e-3 + 500 * 2e-4, rel=0.35)


def test_a_profile_of_plain_steps_alone_foretells_plain_steps() -> None:
    """Batch and tokens are then the same, and what nobody measured must not pull what was measured down."""
    rng = np.random.default_rng(8)
    for _ in range(50):
        steps = [
            StepCost(size, size * length, size, 0, 0, 0, 0.0, (8e-3 + 6e-4 * size + 1e-6 * size * length) * noise)
            for length in (20, 190)
            for size, noise in zip((1, 2, 4, 8), rng.uniform(0.9, 1.2, 4), strict=True)
        ]
        model = CostModel()
        model.fit(steps)
        for step in steps:
            found = float(model.verify_seconds(step.batch, step.kv_tokens, step.tokens))
            assert found == pytest.approx(step.verify_seconds, rel=0.25)
