"""The draft in an engine: what it is told of its first tokens, and reading what was left unread."""

from __future__ import annotations

import numpy as np
import pytest

from rlhfspec_mega.planning.tree import Batch
from rlhfspec_mega.rollout.torch_engine import drafter
from rlhfspec_mega.types import GenerationRequest
from tests.random_trees import RandomTrees
from tests.unit.test_losslessness import make_engine, request
from tests.unit.test_torch_engine import finish, one_thread

__all__ = ["one_thread"]


def test_first_tokens_are_judged_verified_or_not() -> None:
    policy = RandomTrees(3)
    engine = make_engine(8, policy)
    engine.submit([request(number) for number in range(8)])
    finish(engine)
    unverified = 0
    for record in policy.records:
        tree = record.tree
        first = np.flatnonzero((tree.depths == 1) & (tree.ranks == 0))
        assert len(record.root_hits) == len(first)
        verified = np.isin(first, record.chosen)
        assert (record.root_hits[verified] == record.accepted[np.isin(record.chosen, first)]).all()
        unverified += int(record.root_hits[~verified].sum())
    assert unverified > 0


class WhenFull(RandomTrees):
    """Drafts only when the slot can hold no more unread tokens."""

    def depth(self, batch: Batch) -> int:
        return int(batch.backlog >= drafter.BACKLOG)


def test_a_full_backlog_is_no_hindrance_to_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter, "BACKLOG", 64)
    policy = WhenFull(0)
    engine = make_engine(1, policy)
    engine.submit([GenerationRequest("0", "0", (1, 2, 3), 5, 120, 1.0)])
    finish(engine)
    assert sum(record.tree.size > 0 for record in policy.records) == 1
