"""What policies ask history for, and how the draft model stands beside it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from benchmarks.hindsight import Hindsight
from rlhfspec_mega.history.index import History
from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel, StepCost
from rlhfspec_mega.planning.growth import least_to_pay
from rlhfspec_mega.planning.modes import RECALLED
from rlhfspec_mega.planning.strategy import Adaptive
from rlhfspec_mega.planning.tree import DraftTree, StepRecord
from rlhfspec_mega.rollout.torch_engine.drafter import GrownTree
from rlhfspec_mega.rollout.torch_engine.recall import join, recall, recall_alone
from rlhfspec_mega.rollout.torch_engine.slots import SlotState
from rlhfspec_mega.rollout.torch_engine.verification import with_drafts
from tests.synthetic_drafts import make_batch
from tests.unit.test_speculation import make_engine
from tests.unit.test_strategy import cost_of
from tests.unit.test_torch_engine import REQUESTS, generate


def test_drafting_must_beat_what_history_gives() -> None:
    """The same draft pays beside plain decoding, and not where earlier text promises as much for nothing."""
    cost, rng = cost_of(1e-2, 1e-4, 2e-3, 1e-4), np.random.default_rng(4)
    policy = Adaptive(AcceptanceModel(), cost)
    batch = make_batch(4, rng)
    assert policy.depth(batch) > 1
    policy.observe(StepRecord(batch, DraftTree(), np.zeros(0, np.int64), np.zeros(0, bool), 0, 0.0, 0.0))
    assert policy.depth(batch) > 1, "it still pays beside plain steps"
    policy.observe(StepRecord(batch, DraftTree(), np.zeros(0, np.int64), np.zeros(0, bool), 0, 0.0, 0.0))
    assert policy.depth(replace(batch, recalled=np.full(20, 0.9))) == 0


def test_what_is_recalled_in_a_step_counts_in_it() -> None:
    """The costs of a step are kept from when history was asked; what it gave is not forgotten with that."""
    policy = Adaptive(AcceptanceModel(), cost_of(1e-2, 1e-4, 2e-3, 1e-4))
    policy.recalls = True
    batch = make_batch(4, np.random.default_rng(4))
    policy.recall(batch)
    policy.observe(StepRecord(batch, DraftTree(), np.zeros(0, np.int64), np.zeros(0, bool), 0, 0.0, 0.0))
    batch = make_batch(4, np.random.default_rng(5))
    assert policy.recall(batch) is not None
    assert policy.depth(replace(batch, recalled=np.full(20, 0.9))) == 0


def test_draft_tokens_pay_from_the_survival_that_their_time_asks_for() -> None:
    """The second token costs next to nothing, so that both together pay from less than one alone does."""
    assert least_to_pay(np.array([1.0, 1.2, 1.21]), 1) == pytest.approx(0.105)
    assert least_to_pay(np.array([2.0, 2.2, 3.0, 4.0]), 4) == pytest.approx(0.4), "of four samples"


def test_history_is_asked_for_tokens_that_may_pay() -> None:
    dear, cheap = (Adaptive(AcceptanceModel(), cost_of(1e-2, each, 1e-3, 1e-4)) for each in (1e-2, 1e-5))
    batch = make_batch(8, np.random.default_rng(6))
    assert dear.recall(batch) is None
    for policy in (dear, cheap):
        policy.recalls = True
    asked = [policy.recall(batch) for policy in (dear, cheap)]
    assert asked[0] is not None and asked[1] is not None and asked[0].least > 0.3 > asked[1].least


def test_many_cheap_tokens_are_asked_for_although_few_are_dear() -> None:
    """A step of graph size 128: up to it, tokens cost nothing beyond those of 100 samples."""
    knots = (1, 100, 128, 129, 1024)
    cost = CostModel(verify_knots=knots)
    steps = [StepCost(1, 0, n, 0, 0, 0, 0.0, 1e-2 if n <= 128 else 2e-2) for n in knots for _ in range(20)]
    cost.fit(steps)
    policy = Adaptive(AcceptanceModel(), cost)
    policy.recalls = True
    asked = policy.recall(make_batch(100, np.random.default_rng(7)))
    assert asked is not None and asked.least < 0.2


@given(seed=st.integers(0, 10_000), samples=st.integers(1, 9), tail_weight=st.sampled_from([0.0, 0.7]))
@settings(deadline=None, max_examples=25)
def test_a_step_from_history_alone_is_what_its_parts_give(seed: int, samples: int, tail_weight: float) -> None:
    """Looked up, chosen and laid out in one call, or by the calls that a step with a draft model takes."""
    rng = np.random.default_rng(seed)
    history, slots = History(samples, 4096), SlotState(samples, 12, "cpu")
    for slot in range(samples):
        history.admit(slot, (), rng.integers(0, 3, rng.integers(1, 60)).tolist())
    slots.tokens[:], slots.lengths[:] = rng.integers(0, 3, samples), rng.integers(2, 60, samples)
    slots.host_noise[:], slots.host_stops[:, 2] = rng.integers(0, 1 << 30, samples), rng.random() < 0.5
    batch = replace(make_batch(samples, rng), lengths=slots.lengths.copy(), remaining=rng.integers(1, 9, samples))
    policy = Adaptive(AcceptanceModel(), cost_of(1e-3, 10 ** rng.uniform(-6, -3), 1e-3, 1e-4), tail_weight=tail_weight)
    policy.recalls = True
    policy.modes.keep_to(RECALLED)
    if rng.random() < 0.5:  # the pace of such steps is known
        policy.modes._gains.measured[:, RECALLED] = 100.0, rng.uniform(60.0, 150.0)
    ask = policy.recall(batch)
    if ask is None:
        assert (batch.remaining == 1).all()
        return
    assert ask.worth is not None
    device = torch.device("cpu")
    grown, chosen, found = recall_alone(history, ask, ask.worth, batch, slots, policy.max_depth, device)

    general, proposed = GrownTree(), recall(history, ask, batch, slots, policy.max_depth)
    join(general, proposed, samples)
    batch = replace(batch, recalled=proposed.survival)
    wanted = policy.choose(batch, general.tree) if general.tree.size else np.zeros(0, np.int64)
    assert_array_equal(chosen, wanted)
    for name in ("rows", "parents", "depths", "ranks", "gaps", "survival", "ends", "matches", "layers"):
        assert_array_equal(getattr(grown.tree, name), getattr(general.tree, name), err_msg=name)
    assert_array_equal(grown.tokens, general.tokens)
    same = with_drafts(slots.tokens, batch.lengths, general.tree, wanted, general.tokens, device)
    for one, other in zip(found.inputs[:6], same.inputs[:6], strict=True):
        assert torch.equal(one, other)
    assert found.inputs[6:] == same.inputs[6:]
    for one, other in zip(found.nodes, same.nodes, strict=True):
        assert_array_equal(one, other)


def test_the_best_choice_in_hindsight_is_taken_among_all_nodes_from_history() -> None:
    """The benchmark's policy chooses by itself, also where the one that it judges would in the look-up."""
    cost = CostModel()
    policy = Adaptive(AcceptanceModel(), cost)
    policy.recalls = True
    policy.modes.keep_to(RECALLED)
    engine = make_engine(policy, slots=6, history_tokens=4096)
    engine.policy = hindsight = Hindsight(policy, cost)
    for _ in range(2):  # the second time history has the same samples
        generate(engine, REQUESTS)
    assert any(len(step.tokens) > 1 for step in hindsight.steps)
