"""What policies ask history for, and how the draft model stands beside it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel, StepCost
from rlhfspec_mega.planning.growth import least_to_pay
from rlhfspec_mega.planning.strategy import Adaptive
from rlhfspec_mega.planning.tree import DraftTree, StepRecord
from tests.synthetic_drafts import make_batch
from tests.unit.test_strategy import cost_of


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
