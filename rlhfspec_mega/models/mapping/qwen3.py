"""Mapping table of Qwen-3: Llama's with an RMSNorm over each head of queries and keys."""

from __future__ import annotations

from rlhfspec_mega.models.mapping.layouts import Replicated
from rlhfspec_mega.models.mapping.llama import EMBEDDING, HEAD, LAYER_RULES, NORM, VALUE_HEAD
from rlhfspec_mega.models.mapping.table import Mapping, Rule

QK_NORMS = tuple(
    Rule(
        (f"self_attention.{letter}_layernorm.weight",),
        ((f"model.layers.{{layer}}.self_attn.{letter}_norm.weight", "head"),),
        Replicated(),
    )
    for letter in "qk"
)

MAPPING = Mapping("qwen3", EMBEDDING, (*LAYER_RULES, *QK_NORMS), NORM, HEAD, VALUE_HEAD)
