"""Control steps, the watch for a collapse, and the counts of an overseen policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlhfspec_mega.config.schema.generation import SpeculationConfig
from rlhfspec_mega.observe.figures import BY_VERIFIED, collapse_notes, drafting_figures, drafting_metrics
from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel
from rlhfspec_mega.planning.oversight import (
    CONTROL_EVERY,
    CONTROL_STEPS,
    FIRST_CONTROL,
    TRIAL_SIZE,
    WINDOW_SIZE,
    CollapseWatch,
    MonitoredPolicy,
)
from rlhfspec_mega.planning.strategy import Adaptive, Fixed, make_policy
from rlhfspec_mega.planning.tree import ROOT, Batch, DraftTree, StepRecord
from rlhfspec_mega.types import TALLY_EDGES, DraftingTally
from tests.random_trees import RandomTrees
from tests.synthetic_drafts import constant, decode_step, make_batch

SIZE = 10


def batch() -> Batch:
    many = np.full(SIZE, 50)
    return Batch(many, many, many, np.ones(SIZE), backlog=SIZE, samples=np.arange(SIZE))


def step(accepted: int, seconds: float = 1.0, drafted: bool = True) -> StepRecord:
    """Each sample verifies its best first token, or none; the first `accepted` of them are accepted."""
    tree, rows = DraftTree(), np.arange(SIZE)
    zeros = np.zeros(SIZE, np.int64)
    if drafted:
        tree.add_layer(rows, np.full(SIZE, ROOT), zeros, np.ones(SIZE), zeros.astype(bool))
    chosen = np.arange(tree.size)
    hits = chosen < accepted
    return StepRecord(batch(), tree, chosen, hits, 0, 0.0, seconds, hits)


def feed(watch: CollapseWatch, accepted: int, window: int = WINDOW_SIZE) -> None:
    for _ in range(window // SIZE):
        watch.count(SIZE, accepted)


def test_a_collapse_stops_drafting_until_an_update_mends_it() -> None:
    watch = CollapseWatch(ratio=0.5)
    feed(watch, 8)
    feed(watch, 5)
    assert not watch.collapsed and watch.usual is not None and 0.7 < watch.usual < 0.8
    watch.weights_changed()
    feed(watch, 3)
    assert watch.collapsed and watch.rate == pytest.approx(0.3) and not watch.may_draft
    watch.weights_changed()
    assert watch.collapsed and watch.may_draft, "new weights are tried"
    feed(watch, 3, TRIAL_SIZE)
    assert watch.collapsed and not watch.may_draft
    usual = watch.usual
    watch.weights_changed()
    feed(watch, 6, TRIAL_SIZE)
    assert not watch.collapsed and watch.may_draft and watch.usual == usual, "a trial is too short to become usual"
    feed(watch, 8)
    assert watch.usual != usual


def test_an_update_begins_a_new_window() -> None:
    watch = CollapseWatch(ratio=0.5)
    feed(watch, 8)
    for _ in range(WINDOW_SIZE // SIZE - 1):
        watch.count(SIZE, 0)
    watch.weights_changed()
    feed(watch, 8)
    assert not watch.collapsed


def test_tokens_are_judged_whether_or_not_they_are_verified() -> None:
    policy, unverified = MonitoredPolicy(RandomTrees(0), collapse_ratio=0.5), step(7)
    unverified = replace(unverified, chosen=unverified.chosen[:0], accepted=unverified.accepted[:0])
    for _ in range(WINDOW_SIZE // SIZE):
        policy.observe(unverified)
    assert policy.watch.usual == pytest.approx(0.7)


def test_samples_of_another_temperature_are_not_watched() -> None:
    policy = MonitoredPolicy(RandomTrees(0), collapse_ratio=0.5, temperature=1.0)
    mixed = replace(batch(), temperatures=np.array([0.0] * 5 + [1.0] * 5))
    for _ in range(2 * WINDOW_SIZE // SIZE):
        policy.observe(replace(step(7), batch=mixed))  # all 5 greedy samples' first tokens are right, 2 of the others'
    assert policy.watch.usual == pytest.approx(0.4)


def test_a_draft_that_is_hardly_used_is_judged_at_the_end_of_rollouts() -> None:
    policy = MonitoredPolicy(RandomTrees(0), collapse_ratio=0.5)
    feed(policy.watch, 8)
    rates = []
    for _ in range(4):  # each with half of what a trial takes
        policy.watch.weights_changed()
        feed(policy.watch, 1, TRIAL_SIZE // 2)
        rates.append(policy.take_tally().collapsed_rate)
    assert rates == [None, pytest.approx(0.1), None, pytest.approx(0.1)]


@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("name", ["fixed", "adaptive"])
def test_drafting_is_off_while_the_draft_is_broken_and_back_after_the_update_that_mends_it(
    name: str, size: int
) -> None:
    """300 steps between updates; verification that costs little, so that the watch alone stops drafting."""
    rng, cost = np.random.default_rng(0), CostModel.nominal(10**6, 10**4, flops_per_second=1e13)
    inner = make_policy(SpeculationConfig(policy=name, max_num_steps=2, num_steps=2, topk=1), AcceptanceModel(), cost)
    assert inner is not None
    policy, shares = MonitoredPolicy(inner, collapse_ratio=0.5), []
    for chance in (0.8, 0.8, 0.1, 0.1, 0.1, 0.8, 0.8):
        policy.watch.weights_changed()
        records = [decode_step(policy, make_batch(size, rng), constant(chance), rng) for _ in range(300)]
        shares.append(np.mean([record.tree.depth > 0 for record in records]))
    assert min(shares[:2]) > 0.9
    trial = (TRIAL_SIZE / size + 2) / 300
    assert shares[2] < 0.75 and max(shares[3:5]) <= trial
    assert shares[5] > 0.9 and shares[6] > 0.9


def test_a_draft_that_collapsed_by_the_end_of_a_rollout_is_judged_anew_after_an_update() -> None:
    policy = MonitoredPolicy(Adaptive(AcceptanceModel(), CostModel()), collapse_ratio=0.5)
    forgotten = []
    policy.policy.modes.forget_draft = lambda: forgotten.append(True)  # type: ignore[attr-defined]
    feed(policy.watch, 8)
    policy.watch.count(TRIAL_SIZE, 0)
    policy.take_tally()
    assert not policy.watch.may_draft
    policy.watch.weights_changed()
    policy.rests(4, True)
    policy.rests(4, True)
    assert forgotten == [True]


def test_a_collapse_may_be_said_without_stopping() -> None:
    policy = MonitoredPolicy(Fixed(AcceptanceModel(), CostModel(frozen=True), 1, 1, 1), collapse_ratio=0.5, stops=False)
    feed(policy.watch, 8)
    policy.replace_policy(Fixed(AcceptanceModel(), CostModel(frozen=True), 1, 1, 1))
    policy.watch.weights_changed()
    feed(policy.watch, 1)
    tally = policy.take_tally()
    assert tally.collapsed_rate == pytest.approx(0.1) and tally.usual_rate == pytest.approx(0.8)
    policy.watch.weights_changed()
    assert policy.take_tally().collapsed_rate is None, "new weights are on trial"
    assert all(policy.depth(batch()) == 1 for _ in range(FIRST_CONTROL))


def test_control_steps_measure_what_speculation_gains() -> None:
    policy = MonitoredPolicy(RandomTrees(0), collapse_ratio=0.5)
    policy.policy.rests = lambda size, able: 0  # type: ignore[method-assign]
    plain = 0
    for _ in range(10 * CONTROL_EVERY):
        drafted = not policy.rests(batch().size, True)
        plain = 0 if drafted else plain + 1
        # 15 tokens in 2 seconds against 10 in 1.6: 0.133 against 0.16 seconds a token. Other plain steps are slow.
        seconds = 1.6 if plain == CONTROL_STEPS else 9.0
        if drafted:
            policy.observe(step(5, 2.0))
        else:
            policy.rested(batch().samples, batch().kv_tokens, [seconds])
        assert plain <= CONTROL_STEPS
    tally = policy.take_tally()
    assert tally.paired_seconds == pytest.approx(20.0), "ten controls"
    assert tally.paired_plain_seconds / tally.paired_seconds == pytest.approx(15 * 0.16 / 2.0)
    assert policy.take_tally() == DraftingTally(usual_rate=tally.usual_rate)


@pytest.mark.parametrize(("left", "new", "pairs"), [(9, 0, 1), (8, 0, 0), (8, 2, 0), (9, 1, 1)])
def test_a_control_is_compared_with_a_step_of_nearly_the_same_samples(left: int, new: int, pairs: int) -> None:
    policy = MonitoredPolicy(RandomTrees(0), collapse_ratio=0.5)
    policy.policy.rests = lambda size, able: 0  # type: ignore[method-assign]
    samples = np.array([*range(left), *range(100, 100 + new)])
    for _ in range(FIRST_CONTROL + CONTROL_STEPS):
        if policy.rests(batch().size, True):
            policy.rested(samples, 100, [1.6])
        else:
            policy.observe(step(5, 2.0))
    assert policy.take_tally().paired_seconds == pytest.approx(2.0 * pairs)


def test_plain_steps_in_a_row_end_where_a_control_begins() -> None:
    policy, rng = MonitoredPolicy(RandomTrees(0), collapse_ratio=0.5), np.random.default_rng(0)
    policy.policy.rests = lambda size, able: 8  # type: ignore[method-assign]
    kinds = list[bool]()  # of each step, whether it belongs to a control
    while len(kinds) < 5 * CONTROL_EVERY:
        allowed = policy.rests(10, True)
        steps = int(rng.integers(1, allowed + 1))  # fewer where a sample ends
        policy.rested(batch().samples, 100, steps * [1.0])
        kinds += steps * [policy._control.running]
    controls = [(at - FIRST_CONTROL) % CONTROL_EVERY < CONTROL_STEPS for at in range(len(kinds))]
    assert kinds == [control and at >= FIRST_CONTROL for at, control in enumerate(controls)]
    tally = policy.take_tally()
    assert tally.sample_steps == tally.sample_steps_by_verified[0] == 10 * len(kinds)
    assert tally.paired_plain_seconds == tally.paired_seconds == 5.0


def test_counts_and_figures() -> None:
    policy = MonitoredPolicy(RandomTrees(0), collapse_ratio=0.5)
    for accepted in (4, 6):
        policy.observe(step(accepted))
    policy.observe(step(0, drafted=False))
    metrics = drafting_metrics([policy.take_tally(), DraftingTally()])
    assert metrics["speculation/tokens_per_step"] == pytest.approx(1 + 10 / 30)
    assert metrics["speculation/accepted_length"] == pytest.approx(10 / 20)
    assert metrics["speculation/verified_per_accepted"] == pytest.approx(2.0)
    figures = drafting_figures([metrics, metrics])
    assert figures["share_by_verified"]["0"] == pytest.approx(1 / 3)
    assert figures["share_by_verified"]["1"] == pytest.approx(2 / 3)
    assert sum(figures["share_by_verified"].values()) == pytest.approx(1.0)
    assert "speedup_vs_plain" not in figures and drafting_metrics([]) == {} and drafting_figures([{}]) == {}


def test_every_class_has_a_name() -> None:
    assert len(BY_VERIFIED) == len(TALLY_EDGES) + 1 and BY_VERIFIED[3] == "3-4" and BY_VERIFIED[-1] == "over 16"


def test_a_collapse_is_said() -> None:
    assert collapse_notes([DraftingTally(usual_rate=0.8)]) == []
    tallies = [DraftingTally(usual_rate=0.8), DraftingTally(collapsed_rate=0.25, usual_rate=0.8)]
    assert [drafting_metrics(some)["speculation/collapsed_drafts"] for some in (tallies, tallies[:1])] == [1.0, 0.0]
    (note,) = collapse_notes([DraftingTally(collapsed_rate=0.25, usual_rate=0.8)])
    assert "25%" in note and "80%" in note and "no sample is affected" in note
