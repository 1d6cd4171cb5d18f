"""Mapping table of Llama; the rules that Qwen-2 and Qwen-3 share with it."""

from __future__ import annotations

from rlhfspec_mega.models.mapping.layouts import QKV, Gated, Replicated, Row, Vocabulary
from rlhfspec_mega.models.mapping.table import Mapping, Rule

_LAYER = "model.layers.{layer}."

EMBEDDING = Rule(("embedding.word_embeddings.weight",), (("model.embed_tokens.weight", "vocab hidden"),), Vocabulary())
NORM = Rule(("decoder.final_layernorm.weight",), (("model.norm.weight", "hidden"),), Replicated())
HEAD = Rule(("output_layer.weight",), (("lm_head.weight", "vocab hidden"),), Vocabulary())
VALUE_HEAD = Rule(("output_layer.weight",), (("score.weight", "one hidden"),), Replicated())

LAYER_RULES = (
    Rule(
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ((_LAYER + "input_layernorm.weight", "hidden"),),
        Replicated(),
    ),
    Rule(
        ("self_attention.linear_qkv.weight",),
        (
            (_LAYER + "self_attn.q_proj.weight", "query hidden"),
            (_LAYER + "self_attn.k_proj.weight", "key hidden"),
            (_LAYER + "self_attn.v_proj.weight", "key hidden"),
        ),
        QKV(),
    ),
    Rule(("self_attention.linear_proj.weight",), ((_LAYER + "self_attn.o_proj.weight", "hidden query"),), Row()),
    Rule(
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ((_LAYER + "post_attention_layernorm.weight", "hidden"),),
        Replicated(),
    ),
    Rule(
        ("mlp.linear_fc1.weight",),
        ((_LAYER + "mlp.gate_proj.weight", "ffn hidden"), (_LAYER + "mlp.up_proj.weight", "ffn hidden")),
        Gated(),
    ),
    Rule(("mlp.linear_fc2.weight",), ((_LAYER + "mlp.down_proj.weight", "hidden ffn"),), Row()),
)

MAPPING = Mapping("llama", EMBEDDING, LAYER_RULES, NORM, HEAD, VALUE_HEAD)
