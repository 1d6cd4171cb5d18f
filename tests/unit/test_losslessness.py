"""Drafting never changes a token: every policy, greedy and sampled, at batch sizes from 1 to 32; and exact sampling."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rlhfspec_mega.draft import model as draft_model
from rlhfspec_mega.draft.shape import draft_shape
from rlhfspec_mega.models import host_cpu, packed_weights, rope, transformer
from rlhfspec_mega.models.packed_weights import PackedWeights
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.models.transformer import Transformer, causal_attention
from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel
from rlhfspec_mega.planning.strategy import CalibratedPolicy
from rlhfspec_mega.planning.tree import DraftingPolicy
from rlhfspec_mega.rollout.torch_engine import cache, decoder, drafter, host_attention, step_noise
from rlhfspec_mega.rollout.torch_engine.engine import TorchEngine
from rlhfspec_mega.sampling.noise import sample_seed
from rlhfspec_mega.types import FinishReason, GenerationRequest, GenerationResult
from tests.any_policy import any_policy
from tests.near_tie import Logits, assert_same
from tests.random_trees import RandomTrees
from tests.unit.test_speculation import draft_weights, send_draft
from tests.unit.test_torch_engine import finish, one_thread, random_weights, send_weights

__all__ = ["one_thread"]
SHAPE = ModelShape("llama", 32, 2, 4, 2, 12, 48, 29, 160, 10000.0, 1e-6, True)
WEIGHTS = random_weights(3, SHAPE)
TOKENS, SEQUENCES = 100, 204
BATCHES = {1: 4, 9: 36, 32: 164}  # batch size -> sequences decoded at it
POLICIES = ("adaptive", "uniform", "fixed", "ema_tiers", "bandit", "random trees")
# The last two rules choose among trees of a draft model, so they need one.
CASES = [(name, sources) for name in POLICIES for sources in ("draft", "both")] + [
    (name, "history") for name in ("adaptive", "uniform", "fixed", "random trees")
]


def request(number: int) -> GenerationRequest:
    """Every other sample is greedy; prompts of 1 to 23 tokens."""
    prompt = tuple((number * 7 + place * 5) % SHAPE.vocab_size for place in range(1 + number % 23))
    seed, temperature = sample_seed(1, 2, number, 3), float(number % 2)
    return GenerationRequest(f"{number}", f"{number}", prompt, seed, TOKENS, temperature)


REQUESTS = [request(number) for number in range(SEQUENCES)]


def make_engine(
    slots: int, policy: DraftingPolicy | None, shape: ModelShape = SHAPE, sources: str = "draft"
) -> TorchEngine:
    given: dict[str, Any] = {} if policy is None else {"policy": policy}
    if policy is not None and sources != "history":
        given["draft"] = draft_shape(shape)
    if sources != "draft":
        given["history_tokens"] = 4096  # little enough that most of it is forgotten
    engine = TorchEngine(
        shape, slots=slots, max_positions=140, prefill_chunk=64, dtype=torch.float32, device="cpu", **given
    )
    send_weights(engine, WEIGHTS if shape is SHAPE else random_weights(3, shape), piece=10**6)
    if "draft" in given:
        send_draft(engine, draft_weights(draft_shape(shape)))
    return engine


def make(name: str, recalls: bool = False) -> DraftingPolicy:
    if name == "random trees":
        return RandomTrees(7)
    # Drafting and verification cost next to nothing: policies that weigh cost draft as much as they can.
    cost = CostModel.nominal(10**6, 10**4, flops_per_second=1e13, pass_seconds=1e-6)
    policy = any_policy(name, AcceptanceModel(), cost)
    assert isinstance(policy, CalibratedPolicy)
    policy.recalls = recalls
    return policy


def make_judge(shape: ModelShape, weights: dict[str, torch.Tensor]) -> Logits:
    """By the whole-sequence forward in float64."""
    model = Transformer(shape, max_positions=140, dtype=torch.float64, device="cpu")
    model.load(weights)

    def logits_after(tokens: list[int]) -> torch.Tensor:
        hidden = model.hidden(torch.tensor([tokens]), torch.arange(len(tokens))[None], causal_attention(shape))
        return model.logits(hidden)[0, -1]

    return logits_after


@pytest.fixture(scope="module")
def plain() -> Mapping[str, GenerationResult]:
    engine = make_engine(32, None)
    engine.submit(REQUESTS)
    return finish(engine)


@pytest.mark.parametrize(("name", "sources"), CASES)
def test_every_policy_gives_the_tokens_of_plain_decoding(plain, name, sources):
    found: dict[str, GenerationResult] = {}
    steps = 0
    for slots, count in BATCHES.items():
        engine = make_engine(slots, make(name, sources != "draft"), sources=sources)
        engine.submit(REQUESTS[len(found) : len(found) + count])
        found |= finish(engine)
        steps += engine.stats()["decode_steps"] * slots
    assert sum(len(result.tokens) for result in found.values()) >= 20_000 and len(found) >= 200
    assert_same(plain, found, REQUESTS, make_judge(SHAPE, WEIGHTS))
    assert steps < 0.97 * SEQUENCES * TOKENS, "next to nothing was accepted: the comparison shows nothing"


@pytest.mark.parametrize("sources", ["draft", "history", "both"])
@pytest.mark.parametrize("name", ["adaptive", "uniform", "fixed"])
def test_stop_tokens_inside_prompts_and_responses(name, sources):
    """Chat templates have them in their prompts: what follows one there is no draft behind it."""
    stops = (5, 11)
    asked = [dataclasses.replace(one, stop_tokens=stops, ignore_stop=one.temperature == 0) for one in REQUESTS[:36]]
    asked = [dataclasses.replace(one, prompt_tokens=(3, 4, 5, 7, 2, *one.prompt_tokens, 3, 4)) for one in asked]
    alone = make_engine(9, None)
    alone.submit(asked)
    expected = finish(alone)
    engine = make_engine(9, make(name, sources != "draft"), sources=sources)
    engine.submit(asked)
    assert_same(expected, finish(engine), asked, make_judge(SHAPE, WEIGHTS))
    assert {result.finish_reason for result in expected.values()} == {FinishReason.STOP, FinishReason.LENGTH}


def test_a_corrupted_index_changes_no_token(plain):
    """Whatever is proposed, and however often the index is spoilt, the target decides."""
    engine, draw, steps = make_engine(9, make("adaptive", recalls=True), sources="both"), np.random.default_rng(0), 0
    engine.submit(REQUESTS[:36])
    store, found = engine.history._store, []
    while not engine.idle:
        found += engine.poll(0)
        steps += 1
        if steps % 5 == 0:
            store.tokens[:] = draw.integers(0, SHAPE.vocab_size, len(store.tokens))
            store.chains[:] = draw.permutation(store.chains.ravel()).reshape(store.chains.shape)
            store.heads[:] = draw.permutation(store.heads.ravel()).reshape(store.heads.shape)
            store.chunks[:, 2:] = draw.permutation(store.chunks[:, 2:])
    results = {result.sample_id: result for result in found}
    assert_same({name: plain[name] for name in results}, results, REQUESTS[:36], make_judge(SHAPE, WEIGHTS))
    assert len(results) == 36 and steps > 100


def test_scores_made_in_pieces_choose_the_same_tokens(plain, monkeypatch):
    """A large vocabulary's scores do not exist for all inputs at once."""
    # Few entries at once would be computed in 8 bits.
    monkeypatch.setattr(draft_model, "most_entries", lambda matrices: 0)
    policy, whole, scored = RandomTrees(7), RandomTrees(7), list[int]()
    engine = make_engine(9, whole)
    engine.submit(REQUESTS[:18])
    finish(engine)
    for module in (decoder, drafter):
        monkeypatch.setattr(module, "LOGITS_AT_ONCE", 5 * SHAPE.vocab_size)
    logits = Transformer.logits

    def counted(self: Transformer, hidden: torch.Tensor) -> torch.Tensor:
        scored.append(len(hidden))
        return logits(self, hidden)

    monkeypatch.setattr(Transformer, "logits", counted)
    engine = make_engine(9, policy)
    engine.submit(REQUESTS[:18])
    found = finish(engine)
    accepted, expected = ([int(record.accepted.sum()) for record in p.records] for p in (policy, whole))
    assert max(scored) == 5 and accepted == expected and sum(accepted) > 20, "the draft's tokens are the same as well"
    assert_same({name: plain[name] for name in found}, found, REQUESTS[:18], make_judge(SHAPE, WEIGHTS))


@pytest.mark.parametrize("name", ["adaptive", "random trees"])
def test_torch_gives_the_tokens_of_compiled_loops(plain, name, monkeypatch):
    """As on a device."""
    monkeypatch.setattr(step_noise, "COMPILES", False)
    for module in (host_attention, rope, transformer, draft_model):
        monkeypatch.setattr(module, "suits_host_kernels", lambda weights: False)
    monkeypatch.setattr(cache, "COMPILES", False)
    engine, requests = make_engine(9, make(name, True), sources="both"), REQUESTS[:36]
    assert not engine._model._on_host
    engine.submit(requests)
    found = finish(engine)
    assert_same({name: plain[name] for name in found}, found, requests, make_judge(SHAPE, WEIGHTS))


# Not all sizes are multiples of a SIMD register.
WIDE = ModelShape("llama", 32, 2, 4, 2, 12, 256, 520, 160, 10000.0, 1e-6, False)


@pytest.mark.parametrize("name", ["adaptive", "fixed", "random trees"])
def test_a_draft_that_overflows_changes_no_token(plain, name):
    """Its weights are finite, what it puts out is not."""
    engine, requests = make_engine(9, make(name)), REQUESTS[:36]
    send_draft(engine, {key: 1e19 * weights for key, weights in draft_weights(draft_shape(SHAPE)).items()}, 2)
    engine.submit(requests)
    found = finish(engine)
    assert_same({key: plain[key] for key in found}, found, requests, make_judge(SHAPE, WEIGHTS))


@pytest.fixture(params=["transposed", "oneDNN", "oneDNN, rows filled up"])
def layout(request, monkeypatch):
    """Of the packed weights: as on Intel's cores with AVX-512, and as of large ones on cores without and on AMD's."""
    monkeypatch.setattr(packed_weights, "_LEAST_FP32_SIZE", 1)
    monkeypatch.setattr(host_cpu, "mkl_has_avx512", lambda: request.param == "transposed")
    monkeypatch.setattr(host_cpu, "has_avx512", lambda: request.param != "oneDNN")
    monkeypatch.setattr(host_cpu, "has_amx", lambda: False)
    return request.param


def test_packed_weights_follow_an_update_in_mid_run(layout, monkeypatch):
    """Samples go on under the weights that came, as in an engine that packs nothing and never held others."""
    policy, requests = RandomTrees(3), [dataclasses.replace(request(n), max_new_tokens=50) for n in range(16)]
    engine = make_engine(8, policy, WIDE)
    assert bool(engine._model._packed._packed) == (layout != "transposed")
    engine.submit(requests)
    for _ in range(8):
        engine.poll(0)
    begun = [engine.export_sample(sample.request.sample_id) for sample in list(engine._scheduler.active)]
    engine.clear()
    fresh = [each for each in requests if each.sample_id not in {snapshot.request.sample_id for snapshot in begun}]
    assert len(begun) == len(fresh) == 8 and all(snapshot.tokens for snapshot in begun)

    def go_on(receiver: TorchEngine) -> dict[str, GenerationResult]:
        send_weights(receiver, random_weights(4, WIDE), version=2, piece=10**6)
        for snapshot in begun:
            receiver.import_sample(snapshot)
        receiver.submit(fresh)
        return finish(receiver)

    policy.records.clear()
    found = go_on(engine)
    assert sum(int(record.accepted.sum()) for record in policy.records) > 20
    with monkeypatch.context() as patched:
        patched.setattr(PackedWeights, "pack", lambda self, weights: None)
        expected = go_on(make_engine(8, None, WIDE))
    assert_same(expected, found, requests, make_judge(WIDE, random_weights(4, WIDE)))


@pytest.mark.parametrize(("entries", "error"), [(0, 1e-5), (8, 0.02)], ids=["whole", "8 bits"])
def test_packed_weights_of_a_draft_follow_its_update(layout, entries, error, monkeypatch):
    monkeypatch.setattr(draft_model, "most_entries", lambda matrices: entries)
    engine = make_engine(8, RandomTrees(3), WIDE)
    send_draft(engine, weights := draft_weights(draft_shape(WIDE), seed=2), 2)
    states = torch.randn(4, WIDE.hidden_size, generator=torch.Generator().manual_seed(0))
    normed = F.rms_norm(states, (WIDE.hidden_size,), weights["norm.weight"], WIDE.norm_eps)
    expected = F.linear(normed, weights["lm_head.weight"])
    draft = engine._decoder.drafter.model
    found = draft.logits(states)
    assert (found - expected).norm() < error * expected.norm()
    tokens = torch.arange(4)
    parts = (engine._model.embedding[tokens], "input_layernorm"), (states, "hidden_norm")
    inputs = [F.rms_norm(x, x.shape[1:], weights[f"midlayer.{name}.weight"], WIDE.norm_eps) for x, name in parts]
    expected = F.linear(torch.cat(inputs, dim=1), weights["midlayer.self_attn.v_proj.weight"])
    found = draft.keys_values(tokens, states, tokens)[:, WIDE.num_kv_heads :].flatten(1)
    assert (found - expected).norm() < error * expected.norm()


def test_sampled_frequencies_under_speculation_equal_softmax():
    """Pairs of tokens against p(first) p(second | first) of a toy target with a vocabulary of 16: chi-square."""
    shape = ModelShape("llama", 16, 1, 2, 1, 8, 24, 16, 160, 10000.0, 1e-6, True)
    engine, count = make_engine(64, RandomTrees(1, width=4), shape), 16_384
    engine.submit([GenerationRequest(f"{n}", "all", (3, 1, 4), sample_seed(0, n, 1, 2), 2) for n in range(count)])
    found = finish(engine)
    seen = collections.Counter(tuple(result.tokens) for result in found.values())
    assert engine.stats()["decode_steps"] * 64 < 1.9 * count, "hardly any second token was a draft's"
    expected = _pair_probabilities(shape) * count
    often = expected >= 8
    counts = torch.tensor([[seen[a, b] for b in range(16)] for a in range(16)], dtype=torch.float64)
    rest = (expected[~often].sum(), counts[~often].sum())
    statistic = ((counts - expected) ** 2 / expected)[often].sum() + (rest[1] - rest[0]) ** 2 / rest[0]
    freedom = int(often.sum())
    assert freedom > 30
    survival = 1 - torch.special.gammainc(torch.tensor(freedom / 2).double(), statistic / 2)
    assert survival > 1e-3, f"chi-square {statistic:.1f} at {freedom} degrees of freedom"


def _pair_probabilities(shape: ModelShape) -> torch.Tensor:
    model = Transformer(shape, max_positions=8, dtype=torch.float64, device="cpu")
    model.load(random_weights(3, shape))
    tokens = torch.tensor([[3, 1, 4, second] for second in range(16)])
    hidden = model.hidden(tokens, torch.arange(4).expand(16, 4), causal_attention(shape))
    logits = torch.nn.functional.linear(hidden, model.head)
    return logits[0, 2].softmax(-1)[:, None] * logits[:, 3].softmax(-1)
