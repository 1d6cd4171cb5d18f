"""Drafting policies: the best tree against brute force, when to draft at all, probing, and the rivals' rules."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.rivals import Bandit, EmaTiers
from rlhfspec_mega.config.schema.generation import SpeculationConfig
from rlhfspec_mega.planning.acceptance import DEPTHS, AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel, StepCost
from rlhfspec_mega.planning.forecast import Forecast
from rlhfspec_mega.planning.strategy import (
    COSTS_AT_FIRST,
    COSTS_EVERY,
    SETTLING,
    Adaptive,
    CalibratedPolicy,
    Fixed,
    Uniform,
    make_policy,
)
from rlhfspec_mega.planning.tree import ROOT, Batch, DraftTree, Ints, StepRecord
from tests.any_policy import any_policy
from tests.synthetic_drafts import constant, decode_step, logistic, make_batch

POLICIES = ("adaptive", "uniform", "fixed", "ema_tiers", "bandit")


def cost_of(per_pass: float, per_token: float, draft_pass: float, draft_token: float) -> CostModel:
    """A frozen model of straight lines, without any extra price of drafting."""
    steps = []
    for batch in (1, 2, 4, 8, 16, 32, 64):
        for n, length, unread in product((0, 1, 3, 7, 15), (100, 400), (1, 4)):
            depth, drafted, backlog = min(n, 8), batch * max(min(n, 8) - 1, 0), batch * unread
            drafting = draft_pass * depth + draft_token * (backlog + drafted)
            verify = per_pass + per_token * batch * (1 + n)
            steps.append(StepCost(batch, length * batch, batch * (1 + n), backlog, depth, drafted, drafting, verify))
    model = CostModel(frozen=True)
    model.fit(steps)
    return model


FLAT = (1e-2, 1e-7, 1e-4, 1e-7)  # verification costs the same for 1 and 500 tokens; drafting is cheap
LINEAR = (1e-6, 1e-3, 1e-4, 1e-5)  # a token costs a token


def closed(tree: DraftTree, chosen: Ints) -> bool:
    kept = set(chosen.tolist())
    return all(int(parent) == ROOT or int(parent) in kept for parent in tree.parents[chosen])


@st.composite
def small_trees(draw: st.DrawFn) -> tuple[Batch, DraftTree]:
    """Up to 3 samples and 9 nodes, survivals that tie often, parents before children."""
    size = draw(st.integers(1, 3))
    tree = DraftTree()
    layers = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    for layer, count in enumerate(layers):
        last = tree.last_layer
        if layer == 0:
            rows = np.array(draw(st.lists(st.integers(0, size - 1), min_size=count, max_size=count)))
            parents = np.full(count, ROOT)
        else:
            nodes = st.integers(last.start, last.stop - 1)
            parents = np.array(draw(st.lists(nodes, min_size=count, max_size=count)))
            rows = tree.rows[parents]
        tree.add_layer(rows, parents, np.zeros(count, np.int64), np.ones(count), np.zeros(count, bool))
        chances = np.array(draw(st.lists(st.sampled_from([0.1, 0.5, 0.9, 0.999]), min_size=count, max_size=count)))
        above = tree.survival[parents] if layer else np.ones(count)
        tree.survival[tree.last_layer] = above * chances
    generated = np.array(draw(st.lists(st.integers(0, 500), min_size=size, max_size=size)))
    return Batch(generated + 20, generated, np.full(size, 50), np.ones(size), 2 * size, np.arange(size)), tree


@settings(max_examples=60, deadline=None)
@given(
    small_trees(),
    st.tuples(st.floats(1e-4, 1e-2), st.floats(1e-6, 3e-3), st.floats(1e-5, 1e-3), st.floats(1e-6, 1e-4)),
    st.sampled_from([0.0, 1.0]),
    st.integers(1, 4),
)
def test_choose_is_the_best_of_all_closed_subsets(
    given_tree: tuple[Batch, DraftTree], machine: tuple[float, float, float, float], tail: float, most: int
) -> None:
    batch, tree = given_tree
    cost = cost_of(*machine)
    policy = Adaptive(AcceptanceModel(), cost, max_nodes=most, tail_weight=tail)
    weights = (batch.generated + 1.0) ** tail
    weights = weights / weights.mean()
    drafting = cost.draft_seconds(batch.size, batch.kv_tokens, batch.backlog, tree.depth, tree.drafted)

    def rate(chosen: Ints) -> float:
        tokens = weights.sum() + (weights[tree.rows[chosen]] * tree.survival[chosen]).sum()
        verify = cost.verify_seconds(batch.size, batch.kv_tokens, batch.size + len(chosen))
        return float(tokens / (drafting + verify))

    subsets = (np.array(c, np.int64) for n in range(tree.size + 1) for c in combinations(range(tree.size), n))
    allowed = (c for c in subsets if closed(tree, c) and np.bincount(tree.rows[c], minlength=1).max() <= most)
    best = max(rate(c) for c in allowed)
    chosen = policy.choose(batch, tree)
    assert rate(chosen) == pytest.approx(best, rel=1e-9)
    assert closed(tree, chosen) and (np.diff(chosen) > 0).all()


@settings(max_examples=30, deadline=None)
@given(small_trees(), st.tuples(st.floats(1e-4, 1e-2), st.floats(1e-6, 3e-3)))
def test_uniform_takes_the_best_single_number(
    given_tree: tuple[Batch, DraftTree], machine: tuple[float, float]
) -> None:
    batch, tree = given_tree
    cost = cost_of(*machine, 1e-4, 1e-5)
    drafting = cost.draft_seconds(batch.size, batch.kv_tokens, batch.backlog, tree.depth, tree.drafted)
    rates = []
    for n in range(5):
        best = [np.sort(tree.survival[tree.rows == row])[::-1][:n] for row in range(batch.size)]
        kept = np.concatenate(best)
        verify = cost.verify_seconds(batch.size, batch.kv_tokens, batch.size + len(kept))
        rates.append(float((batch.size + kept.sum()) / (drafting + verify)))
    chosen = Uniform(AcceptanceModel(), cost, 2, 3, 4).choose(batch, tree)
    verify = cost.verify_seconds(batch.size, batch.kv_tokens, batch.size + len(chosen))
    assert (batch.size + tree.survival[chosen].sum()) / (drafting + verify) == pytest.approx(max(rates), rel=1e-9)
    assert closed(tree, chosen)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("size", [1, 5])
def test_every_policy_keeps_its_limits_and_decides_the_same_again(name: str, size: int) -> None:
    options = {"max_num_steps": 4, "max_num_draft_tokens": 6, "topk": 3, "num_steps": 4, "num_draft_tokens": 5}

    def run() -> list[StepRecord]:
        rng = np.random.default_rng(0)
        policy = any_policy(name, AcceptanceModel(), CostModel.nominal(50_000_000, 500_000), **options)
        records = []
        for _ in range(40):
            batch = make_batch(size, rng, remaining=int(rng.integers(1, 7)))
            record = decode_step(policy, batch, logistic(), rng, lambda tree, drafted, n: (0.001, 0.01))
            assert record.tree.depth <= policy.max_depth
            records.append(record)
            assert closed(record.tree, record.chosen) and (np.diff(record.chosen) > 0).all()
            assert np.bincount(record.tree.rows[record.chosen], minlength=1).max() <= policy.max_nodes
            assert (record.tree.depths[record.chosen] < batch.remaining[record.tree.rows[record.chosen]]).all()
        return records

    first, second = run(), run()
    assert [r.chosen.tolist() for r in first] == [r.chosen.tolist() for r in second]
    assert any(len(r.chosen) for r in first)


def test_ended_nodes_have_no_children() -> None:
    for policy in (
        Adaptive(AcceptanceModel(), cost_of(*FLAT)),
        Fixed(AcceptanceModel(), cost_of(*FLAT), 4, 4, 8),
        EmaTiers(AcceptanceModel(), cost_of(*FLAT)),
    ):
        batch, tree = make_batch(2, np.random.default_rng(0)), DraftTree()
        assert policy.depth(batch) > 0
        gaps, ends = np.full(2, 5.0), np.array([True, False])
        tree.add_layer(np.arange(2), np.full(2, ROOT), np.zeros(2, np.int64), gaps, ends)
        assert policy.expand(batch, tree).tolist() == [1]


@pytest.mark.parametrize("name", POLICIES)
def test_what_ends_a_sample_is_never_verified(name: str) -> None:
    """The target's choice after its parent ends the sample already."""
    policy = any_policy(name, AcceptanceModel(), cost_of(*FLAT), topk=2, num_steps=2)
    batch, tree = make_batch(2, np.random.default_rng(0)), DraftTree()
    assert policy.depth(batch) > 0
    width = policy.width
    ends = np.tile(np.arange(width) == 0, 2)
    ends[width:] = False
    tree.add_layer(
        np.repeat([0, 1], width), np.full(2 * width, ROOT), np.tile(np.arange(width), 2), np.full(2 * width, 5.0), ends
    )
    policy.expand(batch, tree)
    chosen = policy.choose(batch, tree)
    assert width in chosen and not tree.ends[chosen].any()


class Taught(CostModel):
    """Counts the steps it is shown."""

    shown = 0

    def observe(self, step: StepCost) -> None:
        self.shown += 1


@pytest.mark.parametrize(
    ("name", "costs", "acceptance"),
    [
        ("adaptive", True, True),
        ("uniform", True, True),
        ("fixed", False, True),
        ("bandit", False, True),
        ("ema_tiers", False, False),
    ],
)
def test_a_policy_learns_what_it_reads(name: str, costs: bool, acceptance: bool) -> None:
    rng, taught, model = np.random.default_rng(0), Taught(), AcceptanceModel()
    policy = any_policy(name, model, taught)
    for _ in range(COSTS_AT_FIRST + 10 * COSTS_EVERY):
        decode_step(policy, make_batch(2, rng), constant(0.9), rng)
    if costs:  # of both kinds of steps a fourth, but of plain ones none that follows a draft closely
        assert COSTS_AT_FIRST - 2 * SETTLING <= taught.shown <= COSTS_AT_FIRST + 20
    else:
        assert taught.shown == 0
    assert (model.report().observations > 0) == acceptance


def test_the_first_plain_steps_after_a_draft_teach_no_cost() -> None:
    rng, taught = np.random.default_rng(0), Taught()
    policy = Adaptive(AcceptanceModel(), taught)
    shown = []
    for depth in (1, *[0] * (SETTLING + 2), 1, *[0] * (SETTLING + 1)):
        policy.depth = lambda batch, depth=depth: depth  # type: ignore[method-assign,misc]
        before = taught.shown
        decode_step(policy, make_batch(2, rng), constant(0.5), rng)
        shown.append(taught.shown - before)
    assert shown == [1, *[0] * SETTLING, 1, 1, 1, *[0] * SETTLING, 1]


@pytest.mark.parametrize("forced", [True, False])
def test_what_a_trial_forces_teaches_its_price(forced: bool) -> None:
    rng, taught = np.random.default_rng(0), Taught()
    policy = Adaptive(AcceptanceModel(), taught)
    for _ in range(COSTS_AT_FIRST):
        decode_step(policy, make_batch(2, rng), constant(0.9), rng)
    shown = []
    for _ in range(COSTS_EVERY):
        policy._forced, before = forced, taught.shown
        policy.observe(plain_record(2, 1, 1))
        shown.append(taught.shown - before)
    assert all(shown) if forced else sum(shown) == 1


def mean_depth(policy: CalibratedPolicy, chance: float, size: int, steps: int, rng: np.random.Generator) -> float:
    """Mean depth of the last half of some steps, after the policy learnt from the first."""
    depths = [decode_step(policy, make_batch(size, rng), constant(chance), rng).tree.depth for _ in range(steps)]
    return float(np.mean(depths[steps // 2 :]))


def test_drafting_is_deep_where_it_pays_and_stops_where_it_does_not() -> None:
    rng = np.random.default_rng(1)
    flat, linear = cost_of(*FLAT), cost_of(*LINEAR)
    assert mean_depth(Adaptive(AcceptanceModel(), flat, 2, 8), 0.999, 4, 60, rng) > 7.5
    assert mean_depth(Adaptive(AcceptanceModel(), flat, 2, 8), 0.5, 4, 100, rng) > 2
    assert mean_depth(Adaptive(AcceptanceModel(), linear, 2, 8), 0.7, 4, 300, rng) < 0.1
    # Drafting a layer costs half a plain step, and hardly anything is accepted. Trials remain.
    hopeless = Adaptive(AcceptanceModel(), cost_of(5e-3, 1e-4, 3e-3, 1e-4), 2, 8)
    assert mean_depth(hopeless, 0.02, 4, 200, rng) < 0.1


def test_depths_beyond_those_told_apart_are_forecast_like_the_last() -> None:
    yields = Forecast(AcceptanceModel(), width=2, depth=DEPTHS + 4).for_batch(make_batch(2, np.random.default_rng(0)))
    assert np.isfinite(yields.accepted).all() and (np.diff(yields.accepted, axis=0) >= 0).all()


def test_uniform_drafts_only_where_all_its_layers_pay() -> None:
    rng = np.random.default_rng(5)
    assert mean_depth(Uniform(AcceptanceModel(), cost_of(*FLAT), 2, 4, 8), 0.9, 4, 60, rng) == 4
    assert mean_depth(Uniform(AcceptanceModel(), cost_of(*LINEAR), 2, 4, 8), 0.7, 4, 480, rng) < 0.1  # trials remain
    # A layer costs a third of a plain step: eight of them never pay, and one is no more than a probe to Uniform.
    shallow = CostModel.nominal(50_000_000, 16_000_000, flops_per_second=1e13)
    assert mean_depth(Adaptive(AcceptanceModel(), shallow, 1, 8), 0.55, 4, 100, rng) >= 0.9
    assert mean_depth(Uniform(AcceptanceModel(), shallow, 1, 8, 8), 0.55, 4, 100, rng) <= 1


def test_a_trial_of_uniform_verifies_and_finds_a_recovery() -> None:
    rng = np.random.default_rng(6)
    policy = Uniform(AcceptanceModel(), cost_of(5e-3, 1e-4, 3e-4, 1e-5), 1, 2, 2)
    broken = [decode_step(policy, make_batch(4, rng), constant(0.01), rng) for _ in range(500)]
    probes = [r for r in broken[200:] if r.tree.depth]
    assert probes and all(len(r.chosen) >= 4 for r in probes) and len(probes) < 60
    recovered = [decode_step(policy, make_batch(4, rng), constant(0.95), rng) for _ in range(600)]
    assert np.mean([r.tree.depth for r in recovered[-100:]]) > 1.5


def test_samples_get_draft_tokens_by_their_own_prospects() -> None:
    policy = Adaptive(AcceptanceModel(), cost_of(5e-3, 1e-3, 1e-4, 1e-6), width=1, max_depth=1)
    batch, tree = make_batch(4, np.random.default_rng(0)), DraftTree()
    policy.depth(batch)
    gaps = np.array([9.0, 0.01, 9.0, 0.01])
    tree.add_layer(np.arange(4), np.full(4, ROOT), np.zeros(4, np.int64), gaps, np.zeros(4, bool))
    tree.survival[:] = [0.95, 0.05, 0.95, 0.05]
    assert policy.choose(batch, tree).tolist() == [0, 2]


def test_more_samples_mean_fewer_draft_tokens_each() -> None:
    cost = cost_of(1e-2, 3e-4, 3e-4, 2e-5)
    per_sample = []
    for size in (1, 4, 16, 64):
        rng = np.random.default_rng(2)
        policy = Adaptive(AcceptanceModel(), cost)
        records = [decode_step(policy, make_batch(size, rng), logistic(), rng) for _ in range(40)]
        per_sample.append(np.mean([len(r.chosen) / size for r in records[20:]]))
    assert per_sample[0] > per_sample[1] > per_sample[2] > per_sample[3]


def test_probing_finds_a_recovery_at_a_bounded_price() -> None:
    rng = np.random.default_rng(3)
    machine = (5e-3, 1e-4, 3e-4, 1e-5)
    cost = cost_of(*machine)
    policy = Adaptive(AcceptanceModel(), cost)
    batch_seconds = float(cost.verify_seconds(4, 4000, 4))

    def seconds(record: StepRecord) -> float:
        b, n = record.batch, len(record.chosen)
        drafting = cost.draft_seconds(b.size, b.kv_tokens, b.backlog, record.tree.depth, record.drafted)
        return float(drafting + cost.verify_seconds(b.size, b.kv_tokens, b.size + n))

    for _ in range(150):  # the draft is broken
        decode_step(policy, make_batch(4, rng), constant(0.01), rng)
    broken = [decode_step(policy, make_batch(4, rng), constant(0.01), rng) for _ in range(1400)][800:]
    probes = [r for r in broken if r.tree.depth]
    assert len(probes) > 5 and all(r.tree.depth <= 2 and len(r.chosen) >= 4 for r in probes)
    assert sum(seconds(r) - batch_seconds for r in probes) < 0.015 * 600 * batch_seconds
    recovered = [decode_step(policy, make_batch(4, rng), constant(0.95), rng) for _ in range(1000)]
    assert np.mean([r.tree.depth for r in recovered[-100:]]) > 3


def plain_record(size: int, depth: int, accepted: int, seconds: float = 0.01) -> StepRecord:
    """A step of chains of this depth of which each sample accepted so many tokens."""
    batch, tree = make_batch(size, np.random.default_rng(0)), DraftTree()
    for layer in range(depth):
        parents = np.full(size, ROOT) if layer == 0 else np.arange(size) + tree.last_layer.start
        tree.add_layer(np.arange(size), parents, np.zeros(size, np.int64), np.ones(size), np.zeros(size, bool))
    chosen = np.arange(tree.size)
    return StepRecord(batch, tree, chosen, tree.depths <= accepted, size * max(depth - 1, 0), 0.0, seconds)


def feed(policy: CalibratedPolicy, size: int, accept: Callable[[int], int], steps: int) -> list[int]:
    """Depths chosen over some steps in which `accept` of the depth was accepted."""
    depths = []
    batch = make_batch(size, np.random.default_rng(0))
    for _ in range(steps):
        depths.append(policy.depth(batch))
        policy.observe(plain_record(size, depths[-1], accept(depths[-1])))
    return depths


def test_ema_tiers_rises_and_falls_by_its_thresholds() -> None:
    def policy() -> EmaTiers:
        return EmaTiers(AcceptanceModel(), CostModel(frozen=True), {1: [1, 3, 7], 8: [0, 1, 3]})

    # Starts in the middle with an average of steps - 1; the first check comes after 10 + 5 batches.
    depths = feed(policy(), 1, lambda depth: depth, 40)
    # All accepted: 2 -> 3 passes 2.5 within 15 batches; then 7.
    assert depths[:15] == [3] * 15 and depths[15] == 7
    # One of 3 accepted: the average falls to 1 + 0.8^15, above 0.25 (1 - 0.5 - 0.25): stays.
    assert feed(policy(), 1, lambda depth: 1, 60) == [3] * 60
    # None accepted: 2 * 0.8^15 = 0.07 <= 0.25: down to 1, the lowest candidate there.
    depths = feed(policy(), 1, lambda depth: 0, 40)
    assert depths[:15] == [3] * 15 and set(depths[15:]) == {1}
    # The larger tier switches off at 0.25 and tries again one check later.
    depths = feed(policy(), 8, lambda depth: 0, 31)
    assert depths[:15] == [1] * 15 and depths[15:20] == [0] * 5 and depths[20:25] == [1] * 5
    assert policy().depth(make_batch(5, np.random.default_rng(0))) == 1  # 8 is nearer than 1


def test_bandit_tries_all_arms_and_settles_on_the_fastest() -> None:
    arms = [(1, 1, 1), (2, 1, 2), (4, 1, 4)]
    policy = Bandit(AcceptanceModel(), CostModel(frozen=True), arms, epsilon=0.0, max_batch=8)
    # Everything is accepted and a step takes 10 ms whatever its depth: the deepest wins.
    depths = feed(policy, 2, lambda depth: depth, 10)
    assert depths == [1, 2, 4, 4, 4, 4, 4, 4, 4, 4]
    # Another bucket starts anew; nothing is accepted there, so all arms are alike and the first stays.
    assert feed(policy, 8, lambda depth: 0, 5) == [1, 2, 4, 1, 1]
    assert policy.depth(make_batch(9, np.random.default_rng(0))) == 0
    assert policy.depth(make_batch(1, np.random.default_rng(0))) == 1


def test_bandit_explores_by_its_seed() -> None:
    def depths(seed: int) -> list[int]:
        arms = [(1, 1, 1), (2, 1, 2), (4, 1, 4)]
        policy = Bandit(AcceptanceModel(), CostModel(frozen=True), arms, epsilon=0.5, seed=seed)
        return feed(policy, 1, lambda depth: depth, 60)

    assert depths(0) == depths(0) != depths(1)
    assert 0.15 < np.mean(np.array(depths(0)) != 4) < 0.55  # two thirds of half of the steps


def test_bandit_keeps_to_its_arm() -> None:
    rng = np.random.default_rng(4)
    policy = Bandit(AcceptanceModel(), CostModel(frozen=True), [(3, 2, 5), (2, 4, 8)], epsilon=0.0)
    first, second = (decode_step(policy, make_batch(3, rng), logistic(), rng) for _ in range(2))
    assert first.tree.ranks[first.chosen].max() <= 1 and second.tree.ranks[second.chosen].max() > 1
    assert np.bincount(first.tree.rows[first.chosen]).tolist() == [5, 5, 5] and first.tree.depth == 3
    assert np.bincount(second.tree.rows[second.chosen]).tolist() == [8, 8, 8] and second.tree.depth == 2


def test_off_is_no_policy() -> None:
    assert make_policy(SpeculationConfig(policy="off"), AcceptanceModel(), CostModel()) is None
