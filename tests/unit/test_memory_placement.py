"""Memory estimates against tensors that really exist; placements against their definition."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.config.model_shape import model_shape
from rlhfspec_mega.draft.distillation import Learner, Target, initial_draft
from rlhfspec_mega.draft.model import DraftModel
from rlhfspec_mega.draft.shape import draft_shape
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.host_layer import HostMatrix
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.models.transformer import Transformer
from rlhfspec_mega.planning.megatron_tensors import ParallelLayout
from rlhfspec_mega.planning.memory import (
    LOGITS_AT_ONCE,
    ActorPlan,
    DraftPlan,
    actor_memory,
    draft_memory,
    engine_memory,
    stage_memory,
)
from rlhfspec_mega.planning.placement import ACTOR, ENGINE, PlacementRequest, colocated, separate
from rlhfspec_mega.planning.tree import STEPS_KEPT
from rlhfspec_mega.rollout.torch_engine.cache import KVCache
from rlhfspec_mega.rollout.torch_engine.drafter import Drafter
from tests.unit.test_torch_engine import one_thread

__all__ = ["one_thread"]  # a draft has copies in 8 bits only then


def shape_of(model: str) -> ModelShape:
    hardware = [] if model in ("tiny", "small") else ["cluster=8n8g"]
    return model_shape(load_config([f"model={model}", *hardware]).model)


def plan(*layout: int, **changes: object) -> ActorPlan:
    """`layout`: tensor, pipeline and data parallel size, and model chunks."""
    values: dict[str, object] = {
        "dtype": "float32",
        "sequence_parallel": False,
        "recompute": False,
        "microbatch_tokens": 1024,
        "max_sequence": 512,
        "logprob_chunk": 512,
    }
    return ActorPlan(ParallelLayout(*layout), **{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "low", "high"),
    [
        ("tiny", 0.7e6, 1.1e6),
        ("small", 13e6, 15e6),
        ("8b", 8.03e9, 8.04e9),
        ("32b", 32.7e9, 32.8e9),
        ("70b", 70e9, 71e9),
    ],
)
def test_models_have_the_size_they_are_named_after(model: str, low: float, high: float) -> None:
    shape = shape_of(model)
    tensors = mapping_for(shape.architecture).hf_tensors(shape)
    assert low < sum(math.prod(tensor.shape) for tensor in tensors) < high


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_engine_memory_is_that_of_its_tensors(dtype: str, torch_dtype: torch.dtype) -> None:
    shape = shape_of("tiny")
    cache = KVCache(shape, slots=3, places=50, dtype=torch_dtype, device="meta")
    assert engine_memory(shape, 3, 50, dtype, "cpu").kv == cache.kv.nbytes
    weights = sum(math.prod(t.shape) for t in mapping_for("llama").hf_tensors(shape))
    assert engine_memory(shape, 3, 50, dtype, "cpu").weights == weights * torch_dtype.itemsize


# Every matrix has at least the 512 outputs from which packing pays in fp32.
WIDE = ModelShape("llama", 512, 2, 4, 2, 64, 256, 512, 64, 1e4, 1e-5, True)


def draft_plan(**changes: object) -> DraftPlan:
    values: dict[str, object] = {
        "buffer_tokens": 0,
        "actor_dtype": "float32",
        "slots": 3,
        "positions": 50,
        "nodes": 10,
        "drafted": 12,
        "depth": 4,
        "engine_dtype": "float32",
        "device": "cuda",
    }
    return DraftPlan(**{**values, **changes})  # type: ignore[arg-type]


def test_packed_weights_on_a_cpu_are_counted() -> None:
    draft, model = draft_shape(WIDE), Transformer(WIDE, max_positions=8, dtype=torch.float32, device="cpu")
    beside = DraftModel(draft, model)
    counted = (
        engine_memory(WIDE, 1, 8, "float32", "cpu").packed,
        draft_memory(draft, draft_plan(device="cpu")).engine - draft_memory(draft, draft_plan()).engine,
    )
    for one, bytes_counted in zip((model, beside), counted, strict=True):
        one.weights_changed()
        copies = one._packed.bytes
        if one is beside:
            assert one._host is not None
            matrices = (value for value in vars(one._host).values() if isinstance(value, HostMatrix))
            copies += sum(matrix.weights.nbytes + matrix.scales.nbytes for matrix in matrices)
        assert copies > 0 and bytes_counted == pytest.approx(copies, rel=0.01)
    assert 2 * engine_memory(WIDE, 1, 8, "bfloat16", "cpu").packed == counted[0]
    assert engine_memory(WIDE, 1, 8, "float32", "cuda").packed == 0


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_draft_memory_of_an_engine_is_that_of_its_tensors(dtype: str, torch_dtype: torch.dtype) -> None:
    draft = draft_shape(WIDE, 100)
    model = Transformer(WIDE, max_positions=50, dtype=torch_dtype, device="cpu")
    policy = SimpleNamespace(width=4, max_nodes=10, max_depth=4)  # draws from up to 12 nodes
    drafter = Drafter(draft, model, policy, slots=3)  # type: ignore[arg-type]
    room = KVCache(WIDE, slots=3, places=policy.max_nodes, dtype=torch_dtype, device="cpu").kv
    tensors = [*drafter.model.tensors().values(), drafter.cache.kv, drafter.unread.features, room]
    scores = WIDE.vocab_size * (24 * 3 * 10 + 8 * 3 * 4)  # at draft tokens, and noise for every layer of them
    prefixes = STEPS_KEPT * drafter.unread.features[:, 0].nbytes  # see Drafter.bound_prefixes
    as_put_out = 2 * prefixes  # see Unread.add
    real = sum(tensor.nbytes for tensor in tensors) + as_put_out + scores
    assert draft_memory(draft, draft_plan(engine_dtype=dtype)).engine == real


def test_scores_of_a_large_vocabulary_are_those_made_at_once() -> None:
    large = replace(WIDE, vocab_size=LOGITS_AT_ONCE // 100)
    few, many = (engine_memory(large, slots, 8, "bfloat16", "cuda").scores for slots in (100, 1000))
    noise = (8 + 12) * large.vocab_size
    assert many - 1000 * noise == few - 100 * noise == 24 * 100 * large.vocab_size


def test_draft_memory_of_an_actor_is_that_of_learning() -> None:
    draft = draft_shape(WIDE)
    embedding = torch.randn(WIDE.vocab_size, WIDE.hidden_size)
    target = Target(embedding, embedding.clone(), None, 1.0)
    learner = Learner(draft, initial_draft(draft, target.draft_head, seed=0), 1e-3)
    for weight in learner.weights.values():
        weight.grad = torch.zeros_like(weight)
    learner.optimizer.step()
    moments = [value for state in learner.optimizer.state.values() for value in state.values() if value.dim()]
    held = [*learner.weights.values(), *moments, *learner.state_dict().values()]
    real = sum(tensor.nbytes for tensor in held) + sum(weight.nbytes for weight in learner.weights.values())
    real += 2 * embedding.nbytes + 700 * 4 * WIDE.hidden_size * 2  # states in bf16
    of_a_step = 512 * (1 + 2 * 5) * 4 * draft.vocab_size
    plan = draft_plan(buffer_tokens=700, actor_dtype="bfloat16")
    assert draft_memory(draft, plan).actor == pytest.approx(real + of_a_step, rel=1e-5)
    assert draft_memory(draft, draft_plan()).actor == sum(weight.nbytes for weight in learner.weights.values())


def test_parallelism_and_recomputation_lower_the_estimate() -> None:
    shape = shape_of("70b")
    base = actor_memory(shape, plan(dtype="bfloat16"))
    tensor = actor_memory(shape, plan(8, dtype="bfloat16"))
    assert base.weights == pytest.approx(8 * tensor.weights, rel=1e-3) and tensor.activations < base.activations
    sequence = actor_memory(shape, plan(8, dtype="bfloat16", sequence_parallel=True))
    assert sequence.activations < tensor.activations
    assert actor_memory(shape, plan(recompute=True)).activations < actor_memory(shape, plan()).activations / 5
    sharded = actor_memory(shape, plan(1, 1, 4, dtype="bfloat16"))
    assert sharded.optimizer == pytest.approx(base.optimizer / 4, rel=1e-3) and sharded.gradients == base.gradients
    first, last = (stage_memory(shape, plan(1, 8), stage) for stage in (0, 7))
    assert first.activations > 2 * last.activations, "the first stage keeps eight micro-batches"


@given(devices=st.integers(1, 16), actor=st.integers(1, 16), engines=st.integers(1, 16), each=st.integers(1, 4))
def test_placements(devices: int, actor: int, engines: int, each: int) -> None:
    request = PlacementRequest(devices, actor, 1, engines, each)
    for make, possible in (
        (colocated, actor <= devices and engines * each <= devices),
        (separate, -(-actor // each) * each + engines * each <= devices),
    ):
        if not possible:
            with pytest.raises(UserError):
                make(request)
            continue
        made = make(request)
        assert made.devices(ACTOR) == [(device,) for device in range(actor)]
        own = made.devices(ENGINE)
        assert len(own) == engines and made.devices("critic") == []
        assert all(place == tuple(range(place[0], place[0] + each)) and place[0] % each == 0 for place in own)
        # No two engines share a device, and all lie in the cluster.
        held = [device for place in own for device in place]
        assert len({*held}) == engines * each and max(held) < devices
        shared = set(range(actor)) & {*held}
        assert shared == (set() if make is separate else set(range(min(actor, engines * each))))
        assert made.share_device(ACTOR, ENGINE) == made.share_device(ENGINE, ACTOR) == bool(shared)


@given(devices=st.integers(2, 16), copy=st.integers(1, 8))
def test_where_no_numbers_are_given_the_room_is_filled(devices: int, copy: int) -> None:
    request = PlacementRequest(devices, copy)
    if copy <= devices:
        made = colocated(request)
        assert devices - copy < len(made.devices(ACTOR)) <= devices and len(made.devices(ENGINE)) == devices
    if copy < devices:
        made = separate(request)
        ranks = len(made.devices(ACTOR))
        assert ranks == copy * max(1, (devices - devices // 2) // copy)
        assert len(made.devices(ENGINE)) == devices - ranks


def test_training_devices_are_the_actors_alone() -> None:
    made = separate(PlacementRequest(24, 4, engine_devices=2, training_devices=8))
    assert len(made.devices(ACTOR)) == 8 and [place[0] for place in made.devices(ENGINE)] == list(range(8, 24, 2))
    some = separate(PlacementRequest(24, 4, data_parallel=1, engines=3, training_devices=8))
    assert len(some.devices(ACTOR)) == 4 and some.devices(ENGINE) == [(8,), (9,), (10,)]
    with pytest.raises(UserError, match=r"needs 12 devices .* placement\.training_nodes have 8"):
        separate(PlacementRequest(24, 4, data_parallel=3, training_devices=8))


def test_separate_without_room_for_an_engine_says_how_many_devices() -> None:
    with pytest.raises(UserError, match=r"cluster\.devices_per_node=3"):
        separate(PlacementRequest(devices=2, replica_devices=2))
