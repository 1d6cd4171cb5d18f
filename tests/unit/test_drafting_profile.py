"""The profile of step costs: measures what it says, and leaves the engine as it found it."""

from __future__ import annotations

from rlhfspec_mega.planning.cost import CostModel
from rlhfspec_mega.rollout.torch_engine.profile import CATCHING_UP, SHAPES, profile
from tests.near_tie import assert_same
from tests.random_trees import RandomTrees
from tests.unit.test_speculation import make_engine
from tests.unit.test_torch_engine import JUDGE, REQUESTS, alone, generate, one_thread

__all__ = ["alone", "one_thread"]


def test_a_profile_covers_plain_steps_and_trees_of_all_batches(alone) -> None:
    engine = make_engine(RandomTrees(0, width=4, max_depth=6, max_nodes=24), slots=6)
    policy = engine.policy
    found = profile(engine, seconds=20.0)
    assert {cost.batch for cost in found} == {1, 2, 4, 6}
    assert {(cost.depth, cost.tokens // cost.batch - 1) for cost in found} >= {
        (shape.depth, shape.verified) for shape in SHAPES[:4]
    }
    catching_up = [cost for cost in found if cost.backlog > CATCHING_UP.after * cost.batch]
    assert {cost.batch for cost in catching_up} == {1, 2, 4, 6} and all(cost.depth == 1 for cost in catching_up)
    assert all(cost.verify_seconds > 0 and cost.draft_seconds > 0 for cost in found)
    assert engine.idle and engine.policy is policy and engine.stats()["decode_steps"] == 0
    cost = CostModel()
    cost.fit(found)
    assert_same(alone, generate(engine, REQUESTS), REQUESTS, JUDGE)


def test_a_profile_ends_when_its_time_is_up() -> None:
    assert profile(make_engine(RandomTrees(0), slots=4), seconds=0.0) == []
