"""The global tensors of a Megatron distributed checkpoint, without Megatron.

Such a checkpoint knows no ranks. It holds every parameter once, under its name in Megatron's modules, merged over
tensor-parallel ranks; those of the layers are stacked: `decoder.layers.mlp.linear_fc2.weight` is [layers, hidden, ffn].
Files hold blocks of them, usually the shard of one rank, and a reader takes what it needs out of any blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.models.mapping.layouts import QKV, Gated, Partition, Vocabulary
from rlhfspec_mega.models.mapping.table import Rule, sizes
from rlhfspec_mega.models.shape import ModelShape

LAYERS = "decoder.layers."
# Modules of Megatron's layers that have a place for Transformer Engine's FP8 state; in other precisions it is None,
# but Megatron asks for it when it loads.
_WITH_EXTRA_STATE = (
    "self_attention.core_attention",
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)


@dataclass(frozen=True)
class GlobalTensor:
    """One layer of a stacked tensor of the checkpoint, or a tensor outside the layers.

    Attributes:
        name: in the checkpoint, as Transformer Engine's modules spell it; other spellings: `rule.megatron`.
        layer: from 0; None outside the layers.
        sizes: of this layer, or of the whole tensor; the vocabulary is padded.
    """

    name: str
    rule: Rule
    layer: int | None
    sizes: tuple[int, ...]

    def offsets(self, inside: tuple[int, ...]) -> tuple[int, ...]:
        """Where something in this layer lies in the tensor of the checkpoint."""
        return inside if self.layer is None else (self.layer, *inside)

    def stacked(self, inside: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes of something in this layer as a part of the tensor of the checkpoint."""
        return inside if self.layer is None else (1, *inside)

    def whole(self, layers: int) -> tuple[int, ...]:
        """Sizes of the tensor of the checkpoint."""
        return self.sizes if self.layer is None else (layers, *self.sizes)


def global_tensors(shape: ModelShape, vocab_rows: int) -> Iterator[GlobalTensor]:
    """Every parameter of a model, in the order of its modules: embedding, layers, final norm, output layer."""
    mapping = mapping_for(shape.architecture)
    yield _tensor(mapping.embedding, None, shape, vocab_rows)
    for layer in range(shape.num_layers):
        for rule in mapping.layer_rules:
            yield _tensor(rule, layer, shape, vocab_rows)
    yield _tensor(mapping.norm, None, shape, vocab_rows)
    head = mapping.head_of(shape)
    if head is not None:
        yield _tensor(head, None, shape, vocab_rows)


def extra_states(shape: ModelShape) -> list[str]:
    """Names of the stacked modules' extra states, in the layers; each layer has an object of its own."""
    norms = ("self_attention.q_layernorm", "self_attention.k_layernorm") if shape.qk_norm else ()
    return [f"{LAYERS}{module}._extra_state" for module in (*_WITH_EXTRA_STATE, *norms)]


def stage_of(tensor: GlobalTensor, shape: ModelShape, pipeline: int) -> int:
    """The pipeline stage that holds a tensor; the embedding is on the first, norm and output layer on the last."""
    if tensor.layer is not None:
        return tensor.layer * pipeline // shape.num_layers
    return 0 if tensor.rule is mapping_for(shape.architecture).embedding else pipeline - 1


def pieces(rule: Rule, partition: Partition, rank: int, nbytes: int, most: int) -> list[tuple[Partition, int]]:
    """A rank's shard as one or several shards of a finer partition: an embedding of GiB is never read as a whole.

    Args:
        nbytes, most: bytes of the shard, and of a piece.
    """
    count = 1
    if isinstance(rule.layout, Vocabulary):
        while nbytes > most * count and partition.vocab_rows % (2 * count * partition.tp_size) == 0:
            count *= 2
    finer = Partition(partition.shape, partition.tp_size * count, partition.vocab_rows)
    return [(finer, rank * count + piece) for piece in range(count)]


def _tensor(rule: Rule, layer: int | None, shape: ModelShape, vocab_rows: int) -> GlobalTensor:
    length = sizes(shape) | {"vocab": vocab_rows}
    parts = [tuple(length[word] for word in dimensions.split()) for _, dimensions in rule.hugging_face]
    merged = (sum(part[0] for part in parts), *parts[0][1:]) if isinstance(rule.layout, Gated | QKV) else parts[0]
    name = rule.megatron[-1]
    return GlobalTensor(name if layer is None else LAYERS + name, rule, layer, merged)
