"""The draft in an engine: what it is told of its first tokens, and reading what was left unread."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlhfspec_mega.draft import model as draft_model
from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel
from rlhfspec_mega.planning.strategy import Fixed
from rlhfspec_mega.planning.tree import Batch, StepRecord
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


class Late(RandomTrees):
    """Drafts in every fourth step."""

    def depth(self, batch: Batch) -> int:
        return 3 if len(self.records) % 4 == 3 else 0


def test_keys_and_values_alone_are_those_of_whole_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tokens whose outputs nobody reads, in products of their own or not; slots have unequal numbers of tokens."""
    monkeypatch.setattr(draft_model, "most_entries", lambda matrices: 0)
    found = []
    for apart in (1, 10**6):
        monkeypatch.setitem(drafter.APART, "cpu", apart)
        policy = Late(0)
        engine = make_engine(6, policy)
        engine.submit([request(number) for number in range(6)])
        while engine.load().running < 6 or len(policy.records) < 24:
            engine.poll(0)
        made = engine._decoder.drafter
        trees = [(record.tree.rows.tolist(), record.accepted.tolist()) for record in policy.records]
        found.append((made._read.tolist(), trees, made.cache.kv.clone()))
    (read, trees, kv), (others_read, others_trees, others_kv) = found
    assert read == others_read and trees == others_trees and min(read) > 20
    for slot, entries in enumerate(read):
        torch.testing.assert_close(
            kv[:, :, slot, :, :entries], others_kv[:, :, slot, :, :entries], rtol=1e-4, atol=1e-5
        )


class Recorded(Fixed):
    """Keeps the layers drafted in each step, and those that its samples had room for."""

    def observe(self, record: StepRecord) -> None:
        super().observe(record)
        self.layers = [*getattr(self, "layers", []), (record.tree.depth, int(record.batch.remaining.max()) - 1)]


@pytest.mark.parametrize(("width", "depth", "nodes"), [(4, 6, 8), (2, 5, 4), (1, 4, 4), (8, 4, 32)])
def test_trees_are_as_deep_as_asked_for(width: int, depth: int, nodes: int) -> None:
    """However many nodes of the first layers are drafted from: only those that are kept were limited."""
    policy = Recorded(AcceptanceModel(), CostModel(), width, depth, nodes)
    engine = make_engine(2, policy)
    engine.submit([GenerationRequest(str(number), "0", (1, 2, 3), number, 40, 1.0) for number in range(2)])
    finish(engine)
    roomy = [drafted for drafted, room in policy.layers if room >= depth]
    assert len(roomy) > 5 and max(roomy) == depth
    assert sum(drafted == depth for drafted in roomy) > len(roomy) / 4  # the best nodes may all lie above
