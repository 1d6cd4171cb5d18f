"""Speculative decoding: the tokens of plain decoding, whatever is drafted; a broken tree is noticed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rlhfspec_mega.models.draft_model import DraftModel
from rlhfspec_mega.models.draft_shape import DraftShape, draft_shape
from rlhfspec_mega.models.transformer import Transformer
from rlhfspec_mega.planning.tree import ROOT
from rlhfspec_mega.rollout.torch_engine import verification
from rlhfspec_mega.rollout.torch_engine.engine import TorchEngine
from rlhfspec_mega.types import TensorInfo, WeightTarget
from tests.near_tie import assert_same
from tests.random_trees import RandomTrees
from tests.unit.test_torch_engine import (
    JUDGE,
    MAX_POSITIONS,
    REQUESTS,
    SHAPE,
    WEIGHTS,
    alone,
    finish,
    generate,
    one_thread,
    send_weights,
)

__all__ = ["alone", "one_thread"]
DRAFT = draft_shape(SHAPE)


def draft_weights(shape: DraftShape = DRAFT, seed: int = 1) -> dict[str, torch.Tensor]:
    """A draft that resembles its target: the shared noise alone makes the two agree every other time."""
    model = DraftModel(shape, Transformer(shape.target, max_positions=1, dtype=torch.float32, device="cpu"))
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(t.shape, generator=generator) * 0.1 for name, t in model.tensors().items()}
    for name in weights:
        if "norm" in name:
            weights[name] = torch.ones_like(weights[name])
    return weights


def send_draft(engine: TorchEngine, weights: dict[str, torch.Tensor], version: int = 1) -> None:
    infos = [TensorInfo(name, tuple(t.shape), "float32") for name, t in weights.items()]
    engine.begin_update(version, infos, WeightTarget.DRAFT)
    engine.update_weights([(name, 0, t.flatten()) for name, t in weights.items()])
    engine.end_update(version)


def make_engine(policy: RandomTrees, slots: int = 16, prefill_chunk: int = 64, draft: bool = True) -> TorchEngine:
    sizes = {"slots": slots, "max_positions": MAX_POSITIONS, "prefill_chunk": prefill_chunk}
    engine = TorchEngine(SHAPE, dtype=torch.float32, device="cpu", draft=DRAFT, policy=policy, **sizes)
    send_weights(engine, WEIGHTS)
    if draft:
        send_draft(engine, draft_weights())
    return engine


@pytest.mark.parametrize("slots", [1, 4, 16, 64])
@pytest.mark.parametrize("prefill_chunk", [1, 5, 64])
def test_random_trees_give_the_tokens_of_plain_decoding(alone, slots, prefill_chunk):
    policy = RandomTrees(seed=slots)
    assert_same(alone, generate(make_engine(policy, slots, prefill_chunk), REQUESTS), REQUESTS, JUDGE)
    accepted = sum(int(record.accepted.sum()) for record in policy.records)
    deep = sum(int((record.tree.depths[record.chosen[record.accepted]] > 1).sum()) for record in policy.records)
    assert accepted > 100 and deep > 5, "hardly anything was accepted: the comparison shows nothing"


def test_every_record_is_consistent(alone):
    policy = RandomTrees(seed=5)
    generate(make_engine(policy), REQUESTS)
    for record in policy.records:
        tree, taken = record.tree, record.chosen[record.accepted]
        assert len(np.unique(np.stack((tree.rows[taken], tree.depths[taken])), axis=1).T) == len(taken)
        assert set(tree.parents[taken]) <= {ROOT, *taken}
        assert (tree.depths[record.chosen] < record.batch.remaining[tree.rows[record.chosen]]).all()


@pytest.mark.parametrize("fault", ["siblings see each other", "nodes are blind to their path"])
def test_a_broken_tree_mask_is_noticed(alone, monkeypatch, fault):
    right = verification._paths

    def wrong(parents, columns, depth):
        paths = right(parents, columns, depth)
        if fault == "siblings see each other":
            return np.arange(paths.shape[1]) <= columns[:, None]
        paths[:, 1:] &= np.arange(1, paths.shape[1]) == columns[:, None]
        return paths

    monkeypatch.setattr(verification, "_paths", wrong)
    with pytest.raises(AssertionError):
        assert_same(alone, generate(make_engine(RandomTrees(seed=0)), REQUESTS), REQUESTS, JUDGE)


def test_samples_move_between_engines_while_they_speculate(alone):
    first, second = make_engine(RandomTrees(1), slots=6), make_engine(RandomTrees(2), slots=5)
    first.submit(REQUESTS)
    results = []
    for turn in range(200):
        source, target = (first, second) if turn % 2 == 0 else (second, first)
        results += source.poll(0)
        for sample in list(source._scheduler.active)[: turn % 3]:
            snapshot = source.export_sample(sample.request.sample_id)
            if turn % 5 == 0:
                snapshot = dataclasses.replace(snapshot, draft=None)
            target.import_sample(snapshot)
    found = {result.sample_id: result for result in results} | finish(first) | finish(second)
    assert_same(alone, found, REQUESTS, JUDGE)


def test_a_draft_may_come_and_change_in_the_middle(alone):
    policy = RandomTrees(3)
    engine = make_engine(policy, slots=8, draft=False)
    engine.submit(REQUESTS)
    results = [result for _ in range(4) for result in engine.poll(0)]
    assert not policy.records
    for version in range(1, 4):
        send_draft(engine, draft_weights(seed=version), version)
        results += [result for _ in range(6) for result in engine.poll(0)]
    found = {result.sample_id: result for result in results} | finish(engine)
    assert_same(alone, found, REQUESTS, JUDGE)


def test_unread_tokens_never_overflow(alone, monkeypatch):
    monkeypatch.setattr("rlhfspec_mega.rollout.torch_engine.drafter.BACKLOG", 3)
    policy = RandomTrees(4)
    monkeypatch.setattr(policy, "depth", lambda batch: 2 if len(policy.records) % 5 == 4 else 0)
    assert_same(alone, generate(make_engine(policy), REQUESTS), REQUESTS, JUDGE)
    assert any(record.accepted.any() for record in policy.records)


def test_a_reduced_vocabulary_takes_the_noise_of_the_target_tokens(alone):
    shape = draft_shape(SHAPE, vocab_size=11)
    policy = RandomTrees(6)
    sizes = {
        "slots": 16,
        "max_positions": MAX_POSITIONS,
        "prefill_chunk": 64,
        "draft_vocabulary": torch.arange(1, 12) * 2,
    }
    engine = TorchEngine(SHAPE, dtype=torch.float32, device="cpu", draft=shape, policy=policy, **sizes)
    send_weights(engine, WEIGHTS)
    send_draft(engine, draft_weights(shape))
    assert_same(alone, generate(engine, REQUESTS), REQUESTS, JUDGE)
    assert sum(int(record.accepted.sum()) for record in policy.records) > 20
