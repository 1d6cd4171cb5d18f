"""Mapping table between the parameter names of Megatron-core's GPTModel and those of Hugging Face."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.models.mapping.layouts import Layout
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.types import TensorInfo

_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter and the Hugging Face tensors it holds.

    Attributes:
        megatron: accepted spellings: local layer spec, Transformer Engine's fused norms; within a layer or global.
        hugging_face: (name, dimensions) in the layout's order; "{layer}" stands for the layer number and the dimensions
            are names of `sizes`, e.g. "query hidden".
    """

    megatron: tuple[str, ...]
    hugging_face: tuple[tuple[str, str], ...]
    layout: Layout

    def hf_names(self, layer: int | None) -> list[str]:
        """Hugging Face names, in the order in which `layout` takes and gives the tensors."""
        return [name.format(layer=layer) for name, _ in self.hugging_face]


def sizes(shape: ModelShape) -> dict[str, int]:
    """Lengths of the dimensions that rules name."""
    return {
        "hidden": shape.hidden_size,
        "query": shape.num_heads * shape.head_dim,
        "key": shape.num_kv_heads * shape.head_dim,
        "head": shape.head_dim,
        "ffn": shape.ffn_size,
        "vocab": shape.vocab_size,
        "one": 1,
    }


class Mapping:
    """All rules of one architecture. Layer numbers are global: the caller adds the offset of its pipeline stage."""

    def __init__(
        self,
        architecture: str,
        embedding: Rule,
        layer_rules: Sequence[Rule],
        norm: Rule,
        head: Rule,
        value_head: Rule,
    ) -> None:
        self.architecture = architecture
        self.embedding = embedding
        self.layer_rules = tuple(layer_rules)
        self.norm = norm
        self.head = head
        self.value_head = value_head
        self._in_layer = {name: rule for rule in self.layer_rules for name in rule.megatron}
        self._global = {name: rule for rule in (embedding, norm, head) for name in rule.megatron}

    def head_of(self, shape: ModelShape) -> Rule | None:
        """The rule of what follows the final norm; None where that is the embedding."""
        if shape.value_head:
            return self.value_head
        return None if shape.tie_embeddings else self.head

    def hf_tensors(self, shape: ModelShape, dtype: str = "float32") -> list[TensorInfo]:
        """Names and full shapes of every Hugging Face tensor in model order; no head where embeddings are tied."""
        rules: list[tuple[Rule, int | None]] = [(self.embedding, None)]
        rules += [(rule, layer) for layer in range(shape.num_layers) for rule in self.layer_rules]
        rules += [(rule, None) for rule in (self.norm, self.head_of(shape)) if rule is not None]
        length = sizes(shape)
        return [
            TensorInfo(name.format(layer=layer), tuple(length[word] for word in dimensions.split()), dtype)
            for rule, layer in rules
            for name, dimensions in rule.hugging_face
        ]

    def rule_for(self, megatron_name: str, shape: ModelShape | None = None) -> tuple[Rule, int | None]:
        """Rule and global layer number (None outside the layers) of a Megatron parameter.

        With tied embeddings the last pipeline stage holds a copy of the embedding as `output_layer.weight`: its rule is
        then the embedding's, right for loading, while an exporter leaves that copy out. A value head has the same name.
        Raises RunError for a parameter that the architecture does not have.

        Args:
            shape: decides what the output layer is; None: logits that are not tied.
        """
        match = _LAYER_NAME.fullmatch(megatron_name)
        rule = self._in_layer.get(match[2]) if match else self._global.get(megatron_name)
        if rule is None:
            raise RunError(
                f"The Megatron parameter {megatron_name} has no counterpart in {self.architecture}: "
                "the layer spec or the transformer config does not fit the model's architecture."
            )
        if rule is self.head and shape is not None:
            rule = self.head_of(shape) or self.embedding
        return rule, int(match[1]) if match else None
