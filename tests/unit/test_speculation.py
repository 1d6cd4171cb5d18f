"""Speculative decoding: the tokens of plain decoding, whatever is drafted; a broken tree is noticed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rlhfspec_mega.draft.model import DraftModel
from rlhfspec_mega.draft.shape import DraftShape, draft_shape
from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.models.transformer import Transformer
from rlhfspec_mega.planning.tree import ROOT
from rlhfspec_mega.rollout.protocol import DraftPast
from rlhfspec_mega.rollout.torch_engine import verification
from rlhfspec_mega.rollout.torch_engine.engine import TorchEngine
from rlhfspec_mega.rollout.torch_engine.slots import SlotState
from rlhfspec_mega.rollout.torch_engine.step_noise import DeviceNoise
from rlhfspec_mega.sampling.noise import gumbel_from_states
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


def make_engine(
    policy: RandomTrees, slots: int = 16, prefill_chunk: int = 64, draft: bool = True, history_tokens: int = 0
) -> TorchEngine:
    sizes = {"slots": slots, "max_positions": MAX_POSITIONS, "prefill_chunk": prefill_chunk}
    sizes |= {"history_tokens": history_tokens}
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
    assert accepted > 60 and deep > 5, "hardly anything was accepted: the comparison shows nothing"


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
    right = verification.flat_inputs

    def wrong(last_tokens, lengths, *tree):
        made, longest = right(last_tokens, lengths, *tree), int(lengths.max())
        columns, paths = made.arrays[3][:, None], made.visible[:, longest:]
        places = np.arange(1, paths.shape[1] + 1)
        paths[:] = places <= columns if fault == "siblings see each other" else places == columns
        return made

    monkeypatch.setattr(verification, "flat_inputs", wrong)
    with pytest.raises(AssertionError):
        assert_same(alone, generate(make_engine(RandomTrees(seed=0)), REQUESTS), REQUESTS, JUDGE)


@pytest.mark.parametrize("history_tokens", [0, 2048])
def test_samples_move_between_engines_while_they_speculate(alone, history_tokens):
    first = make_engine(RandomTrees(1), slots=6, history_tokens=history_tokens)
    second = make_engine(RandomTrees(2), slots=5, history_tokens=history_tokens)
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


def test_noise_is_made_no_deeper_than_asked_and_is_the_same_in_pieces(monkeypatch):
    slots = SlotState(3, 29, "cpu")
    slots.noise[:], slots.lengths[:] = torch.tensor([5, 6, 7]), [4, 9, 30]
    slots.temperatures[:] = slots.host_temperatures[:] = 1.0
    rows, depths = np.repeat(np.arange(3), 5), np.tile(np.arange(5), 3)
    logits = torch.zeros(15, 29)
    whole = DeviceNoise(slots, 3, 5).scores(logits, rows, depths)[1]
    assert torch.equal(
        whole, gumbel_from_states(slots.noise[rows], torch.from_numpy(slots.lengths[rows] - 1 + depths), 29)
    )
    made = []
    monkeypatch.setattr("rlhfspec_mega.rollout.torch_engine.step_noise._BLOCK_CELLS", 2 * 3 * 29)
    monkeypatch.setattr(
        "rlhfspec_mega.rollout.torch_engine.step_noise.gumbel_from_states",
        lambda states, positions, vocab: (
            made.append(positions.shape[1]) or gumbel_from_states(states, positions, vocab)
        ),
    )
    noise = DeviceNoise(slots, 3, 5)
    assert torch.equal(
        noise.scores(logits[:3], np.arange(3), np.ones(3, np.int64))[1], whole[depths == 1]
    ) and made == [2]
    shallow = depths < 3
    assert torch.equal(noise.scores(logits[shallow], rows[shallow], depths[shallow])[1], whole[shallow])
    assert made == [2, 2]
    assert torch.equal(noise.scores(logits, rows, depths)[1], whole) and made == [2, 2, 1]


def accepted_share(policy: RandomTrees) -> float:
    return sum(record.accepted.sum() for record in policy.records) / sum(len(r.chosen) for r in policy.records)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("send", [send_weights, send_draft])
def test_weights_that_are_not_finite_are_refused_by_name(send, value):
    engine = make_engine(RandomTrees(0))
    weights = {name: tensor.clone() for name, tensor in (WEIGHTS if send is send_weights else draft_weights()).items()}
    name = list(weights)[3]
    weights[name].view(-1)[2] = value
    with pytest.raises(RunError, match=f"NaN or infinity in {name};"):
        send(engine, weights, version=2)


def test_a_spoilt_draft_cache_does_not_outlive_its_weights(alone):
    spoilt, whole = RandomTrees(1), RandomTrees(1)
    engine = make_engine(spoilt)
    engine._decoder.drafter.cache.kv.fill_(torch.nan)  # as an overflow leaves it
    send_draft(engine, draft_weights(), 2)
    assert_same(alone, generate(engine, REQUESTS), REQUESTS, JUDGE)
    generate(make_engine(whole), REQUESTS)
    assert accepted_share(spoilt) == pytest.approx(accepted_share(whole), rel=0.05)


def test_a_sample_that_came_before_the_drafts_weights_is_not_drafted_for():
    first, second = make_engine(RandomTrees(1)), make_engine(RandomTrees(2), draft=False)
    request = dataclasses.replace(REQUESTS[-1], max_new_tokens=30, stop_tokens=(), ignore_stop=False)
    first.submit([request])
    first.poll(0)
    second.import_sample(first.export_sample(request.sample_id))
    second.poll(0)
    send_draft(second, draft_weights())
    second.poll(0)
    assert second.export_sample(request.sample_id).draft is None, "plain steps left a gap in what the draft has read"


@pytest.mark.parametrize(
    "change",
    [
        lambda past: dataclasses.replace(past, kv=past.kv[:, :, :1]),
        lambda past: dataclasses.replace(past, kv=past.kv[0]),
        lambda past: dataclasses.replace(past, kv=past.kv[:, :, :, 1:]),
        lambda past: dataclasses.replace(past, features=past.features[:, 1:]),
        lambda past: DraftPast(
            past.kv[:, :, :, :0], past.features[:1].repeat(past.kv.shape[3] + len(past.features), 1)
        ),
    ],
    ids=["heads", "layers", "gap", "width", "too much unread"],
)
def test_a_draft_past_that_does_not_fit_is_refused(monkeypatch, change):
    monkeypatch.setattr("rlhfspec_mega.rollout.torch_engine.drafter.BACKLOG", 3)
    engine, request = make_engine(RandomTrees(1)), dataclasses.replace(REQUESTS[-1], max_new_tokens=30)
    engine.submit([request])
    engine.poll(0)
    snapshot = engine.export_sample(request.sample_id)
    with pytest.raises(UserError, match="draft state"):
        engine.import_sample(dataclasses.replace(snapshot, draft=change(snapshot.draft)))
    engine.import_sample(snapshot)
    assert finish(engine).keys() == {request.sample_id}


def test_a_draft_vocabulary_of_one_token_is_refused():
    with pytest.raises(UserError, match="at least 2 tokens"):
        draft_shape(SHAPE, vocab_size=1)


def test_each_step_has_an_array_of_samples_of_its_own():
    """Policies know by it whether two batches are of the same step."""
    policy = RandomTrees(0)
    generate(make_engine(policy), REQUESTS)
    assert len(policy.records) > 3
    assert len({id(record.batch.samples) for record in policy.records}) == len(policy.records)
