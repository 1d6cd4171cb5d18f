"""The profile of step costs: measures what it says, and leaves the engine as it found it."""

from __future__ import annotations

import numpy as np
import torch

from rlhfspec_mega.history.propose import Proposed
from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel
from rlhfspec_mega.planning.strategy import Adaptive
from rlhfspec_mega.rollout.torch_engine import decoder
from rlhfspec_mega.rollout.torch_engine.drafter import GrownTree
from rlhfspec_mega.rollout.torch_engine.engine import TorchEngine
from rlhfspec_mega.rollout.torch_engine.profile import CATCHING_UP, SHAPES, profile, rehearse
from rlhfspec_mega.rollout.torch_engine.recall import join
from rlhfspec_mega.types import DECODE_MODES
from tests.near_tie import assert_same
from tests.random_trees import RandomTrees
from tests.unit.test_speculation import make_engine
from tests.unit.test_torch_engine import (
    JUDGE,
    MAX_POSITIONS,
    REQUESTS,
    SHAPE,
    WEIGHTS,
    alone,
    generate,
    one_thread,
    send_weights,
)

__all__ = ["alone", "one_thread"]


def test_a_profile_covers_plain_steps_and_trees_of_all_batches(alone) -> None:
    engine = make_engine(RandomTrees(0, width=4, max_depth=6, max_nodes=24), slots=6)
    policy = engine.policy
    found = profile(engine, seconds=20.0)
    assert {cost.batch for cost in found} == {1, 2, 4, 6}
    assert {(cost.depth, cost.tokens // cost.batch - 1) for cost in found} >= {
        (shape.depth, shape.verified) for shape in SHAPES[:4]
    }
    catching_up = [cost for cost in found if cost.depth == 1 and cost.backlog > CATCHING_UP.after * cost.batch]
    assert {cost.batch for cost in catching_up} == {1, 2, 4, 6}
    assert all(cost.verify_seconds > 0 and cost.draft_seconds > 0 for cost in found)
    assert engine.idle and engine.policy is policy and engine.stats()["decode_steps"] == 0
    cost = CostModel()
    cost.fit(found)
    assert_same(alone, generate(engine, REQUESTS), REQUESTS, JUDGE)


def test_an_engine_without_a_draft_model_is_profiled_with_made_up_proposals(alone) -> None:
    policy = RandomTrees(0, width=4, max_depth=6, max_nodes=24)
    engine = TorchEngine(
        SHAPE,
        slots=6,
        max_positions=MAX_POSITIONS,
        prefill_chunk=64,
        dtype=torch.float32,
        device="cpu",
        policy=policy,
        history_tokens=4096,
    )
    send_weights(engine, WEIGHTS)
    history = engine.history
    found = profile(engine, seconds=20.0)
    assert {(cost.batch, cost.tokens // cost.batch - 1) for cost in found} >= {(1, 0), (1, 1), (1, 6), (6, 0), (6, 6)}
    assert all(cost.depth == 0 and cost.verify_seconds > 0 for cost in found)
    assert engine.history is history and engine.policy is policy and history is not None
    assert not (history._store.chunks[:, 0] >= 0).any(), "nothing that was made up is remembered"
    assert_same(alone, generate(engine, REQUESTS), REQUESTS, JUDGE)


def test_a_profile_ends_when_its_time_is_up() -> None:
    assert profile(make_engine(RandomTrees(0), slots=4), seconds=0.0) == []


def test_a_rehearsal_drafts_in_both_ways_and_leaves_no_trace(alone, monkeypatch) -> None:
    """So that nothing is compiled, or loaded, in the first steps that count."""
    engine = make_engine(RandomTrees(0, width=4, max_depth=6, max_nodes=24), slots=6, history_tokens=4096)
    joined = list[int]()

    def watched(grown: GrownTree, proposed: Proposed, samples: int) -> None:
        joined.append(grown.tree.depth)
        join(grown, proposed, samples)

    monkeypatch.setattr(decoder, "join", watched)
    own, history, cost = engine.policy, engine.history, CostModel()
    policy = Adaptive(AcceptanceModel(), cost)
    policy.recalls = True
    rehearse(engine, policy)
    made = np.reshape(policy.modes.take_tally()[1], (-1, len(DECODE_MODES))).sum(axis=0)
    assert any(joined), "draft tokens of both in one tree"
    assert (made[1:] > 0).all(), "steps with draft tokens from history, and some for which the draft model ran"
    assert engine.idle and engine.policy is own and engine.history is history and history is not None
    assert engine.stats()["decode_steps"] == 0 and not (history._store.chunks[:, 0] >= 0).any()
    assert_same(alone, generate(engine, REQUESTS), REQUESTS, JUDGE)
