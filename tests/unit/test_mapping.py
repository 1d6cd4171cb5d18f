"""HF <-> Megatron: layouts against per-head loops, names against Megatron's modules, round trips bit by bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.models.mapping.layouts import QKV, Gated, Partition, Vocabulary, padded_vocab_size
from rlhfspec_mega.models.shape import ARCHITECTURES, ModelShape


def make_shape(architecture: str = "llama", heads: int = 8, kv_heads: int = 4, vocab: int = 300, tie: bool = False):
    return ModelShape(architecture, 24, 3, heads, kv_heads, 4, 16, vocab, 64, 1e4, 1e-5, tie)


def random_weights(shape: ModelShape) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {info.name: torch.randn(info.shape) for info in mapping_for(shape.architecture).hf_tensors(shape)}


def megatron_names(shape: ModelShape, fused_norms: bool) -> list[str]:
    """Parameter names of GPTModel, written down from megatron-core's modules."""
    layer = ["self_attention.linear_qkv.weight", "self_attention.linear_proj.weight"]
    layer += ["mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]
    if fused_norms:
        layer += ["self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"]
    else:
        layer += ["input_layernorm.weight", "pre_mlp_layernorm.weight"]
    if shape.architecture == "qwen2":
        layer.append("self_attention.linear_qkv.bias")
    if shape.architecture == "qwen3":
        layer += ["self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"]
    names = [f"decoder.layers.{number}.{name}" for number in range(shape.num_layers) for name in layer]
    names += ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight"]
    return names if shape.tie_embeddings else [*names, "output_layer.weight"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("tie", [False, True])
def test_every_weight_survives_the_round_trip(architecture, tp_size, tie):
    shape = make_shape(architecture, tie=tie)
    weights = random_weights(shape)
    mapping, partition = mapping_for(architecture), Partition(shape, tp_size)
    seen: dict[str, torch.Tensor] = {}
    for megatron_name in megatron_names(shape, fused_norms=tp_size == 2):
        rule, layer = mapping.rule_for(megatron_name)
        names = rule.hf_names(layer)
        shards = [rule.layout.split([weights[name] for name in names], partition, rank) for rank in range(tp_size)]
        assert len({shard.shape for shard in shards}) == 1
        seen.update(zip(names, rule.layout.merge([shard.clone() for shard in shards], partition), strict=True))
    assert seen.keys() == weights.keys()
    assert all(torch.equal(seen[name], weights[name]) for name in weights)


@settings(max_examples=40, deadline=None)
@given(
    tp_size=st.sampled_from([1, 2, 4]),
    groups=st.sampled_from([1, 2, 4, 8]),
    per_group=st.integers(1, 3),
    head_dim=st.sampled_from([4, 8]),
    bias=st.booleans(),
)
def test_qkv_is_interleaved_by_query_group(tp_size, groups, per_group, head_dim, bias):
    shape = ModelShape("qwen2", 6, 1, groups * per_group, groups, head_dim, 8, 10, 8, 1e4, 1e-6, True)
    tail = () if bias else (6,)
    q = torch.randn(groups * per_group, head_dim, *tail)
    k, v = torch.randn(groups, head_dim, *tail), torch.randn(groups, head_dim, *tail)
    rows: list[torch.Tensor] = []
    for group in range(groups):  # q1 q2 k1 v1 | q3 q4 k2 v2 | ...
        rows += [q[group * per_group + head] for head in range(per_group)] + [k[group], v[group]]
    expected = torch.cat(rows)
    partition = Partition(shape, tp_size)
    full = [tensor.flatten(0, 1) for tensor in (q, k, v)]
    shards = [QKV().split(full, partition, rank) for rank in range(tp_size)]
    assert torch.equal(torch.cat(shards), expected)
    assert all(torch.equal(a, b) for a, b in zip(QKV().merge(shards, partition), full, strict=True))


def test_gated_holds_both_halves_of_its_rank():
    shape = make_shape()
    gate, up = torch.randn(16, 24), torch.randn(16, 24)
    shard = Gated().split([gate, up], Partition(shape, 4), 2)
    assert torch.equal(shard, torch.cat([gate[8:12], up[8:12]]))


@settings(max_examples=60, deadline=None)
@given(vocab=st.integers(1, 1500), tp_size=st.sampled_from([1, 2, 4]), extra=st.none() | st.integers(0, 700))
def test_vocabulary_padding_is_added_and_stripped(vocab, tp_size, extra):
    padded = None if extra is None else (vocab + extra + tp_size - 1) // tp_size * tp_size
    partition = Partition(make_shape(vocab=vocab), tp_size, padded)
    embedding = torch.randn(vocab, 3)
    shards = [Vocabulary().split([embedding], partition, rank) for rank in range(tp_size)]
    full = torch.cat(shards)
    assert full.shape[0] == (padded_vocab_size(vocab, tp_size) if padded is None else padded)
    assert torch.equal(full[:vocab], embedding) and not full[vocab:].any()
    assert torch.equal(Vocabulary().merge(shards, partition)[0], embedding)


@pytest.mark.parametrize(("vocab", "tp_size", "rows"), [(128, 1, 128), (129, 1, 256), (32000, 2, 32000), (1, 4, 512)])
def test_padded_vocab_size(vocab, tp_size, rows):
    assert padded_vocab_size(vocab, tp_size) == rows


def test_tied_output_layer_is_the_embedding():
    rule, layer = mapping_for("llama").rule_for("output_layer.weight", make_shape(tie=True))
    assert rule.hf_names(layer) == ["model.embed_tokens.weight"]
    assert all(info.name != "lm_head.weight" for info in mapping_for("llama").hf_tensors(make_shape(tie=True)))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sizes_add_up_to_the_shapes_parameter_count(architecture):
    shape = make_shape(architecture)
    assert sum(weight.numel() for weight in random_weights(shape).values()) == shape.parameters


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match="gemma"):
        mapping_for("gemma")
    for name in ("decoder.layers.0.self_attention.linear_proj.bias", "decoder.layers.x.mlp.linear_fc1.weight"):
        with pytest.raises(RunError, match=r"decoder\.layers"):
            mapping_for("llama").rule_for(name)
    with pytest.raises(UserError, match="tensor_parallel"):
        Gated().split([torch.zeros(16, 2)] * 2, Partition(make_shape(), 3), 0)
