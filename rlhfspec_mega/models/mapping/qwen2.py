"""Mapping table of Qwen-2: Llama's with a bias on queries, keys and values."""

from __future__ import annotations

from rlhfspec_mega.models.mapping.layouts import QKV
from rlhfspec_mega.models.mapping.llama import EMBEDDING, HEAD, LAYER_RULES, NORM, VALUE_HEAD
from rlhfspec_mega.models.mapping.table import Mapping, Rule

QKV_BIAS = Rule(
    ("self_attention.linear_qkv.bias",),
    (
        ("model.layers.{layer}.self_attn.q_proj.bias", "query"),
        ("model.layers.{layer}.self_attn.k_proj.bias", "key"),
        ("model.layers.{layer}.self_attn.v_proj.bias", "key"),
    ),
    QKV(),
)

MAPPING = Mapping("qwen2", EMBEDDING, (*LAYER_RULES, QKV_BIAS), NORM, HEAD, VALUE_HEAD)
