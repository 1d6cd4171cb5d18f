"""The parameters of every Megatron rank, and the buffers in which Megatron keeps them, exactly, without Megatron."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from rlhfspec_mega.models.shape import ModelShape, padded_vocab_size

_PARAMETER_START, _BUCKET_END = 64, 128  # Megatron's distributed optimizer aligns them to multiples of so many elements


@dataclass(frozen=True)
class ParallelLayout:
    """How a model is spread over ranks. `chunks`: model chunks per pipeline stage (interleaved schedule)."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    chunks: int = 1


@dataclass(frozen=True)
class Parameter:
    """A parameter tensor of one rank. `shared`: a tied embedding that the first and the last stage both hold."""

    elements: int
    shared: bool = False


Chunk = tuple[Parameter, ...]  # the parameters of a model chunk, in the order of Megatron's module


@dataclass(frozen=True)
class Buffer:
    """Where the distributed optimizer keeps a chunk's parameters: one contiguous buffer in one or more buckets.

    Attributes:
        elements: length of the buffer of parameters, and of that of gradients, padding included.
        owned: parameter elements of which each data-parallel rank keeps the optimizer's state.
    """

    elements: int
    owned: tuple[int, ...]


def chunks_of(shape: ModelShape, layout: ParallelLayout, stage: int) -> list[Chunk]:
    """The model chunks of every rank of a pipeline stage; all its tensor-parallel ranks hold as many elements.

    Chunk i of stage s is the part i x PP + s of the model, of layers / (PP x chunks) layers each. The first part has
    the embedding; the last one the final norm and the output layer, which is a copy of the embedding if they are tied,
    or the value head.
    """
    parts = layout.pipeline * layout.chunks
    rows = padded_vocab_size(shape.vocab_size, layout.tensor) // layout.tensor
    layers = _layer(shape, layout.tensor) * (shape.num_layers // parts)
    tied_apart = shape.tie_embeddings and layout.pipeline > 1
    found = []
    for part in range(stage, parts, layout.pipeline):
        chunk = list(layers)
        if part == 0:
            chunk.insert(0, Parameter(rows * shape.hidden_size, tied_apart))
        if part == parts - 1:
            chunk.append(Parameter(shape.hidden_size))
            if shape.value_head:
                chunk.append(Parameter(shape.hidden_size))
            elif tied_apart or not shape.tie_embeddings:
                chunk.append(Parameter(rows * shape.hidden_size, tied_apart))
        found.append(tuple(chunk))
    return found


def parameters_per_rank(shape: ModelShape, layout: ParallelLayout) -> list[int]:
    """Number of parameters of a rank of each pipeline stage."""
    return [
        sum(parameter.elements for chunk in chunks_of(shape, layout, stage) for parameter in chunk)
        for stage in range(layout.pipeline)
    ]


def buffers(shape: ModelShape, layout: ParallelLayout, stage: int) -> list[Buffer]:
    """The buffers of a stage's chunks (megatron.core.distributed.param_and_grad_buffer, without overlap)."""
    return [_buffer(chunk, layout.data) for chunk in chunks_of(shape, layout, stage)]


def _layer(shape: ModelShape, tensor: int) -> list[Parameter]:
    hidden, head = shape.hidden_size, shape.head_dim
    qkv, ffn = head * (shape.num_heads + 2 * shape.num_kv_heads) // tensor, shape.ffn_size // tensor
    attention = [hidden, shape.num_heads * head // tensor * hidden, qkv * hidden]  # norm, projection, queries to values
    attention += [qkv] if shape.qkv_bias else []
    attention += [head, head] if shape.qk_norm else []
    return [Parameter(elements) for elements in (*attention, hidden, 2 * ffn * hidden, ffn * hidden)]


def _buffer(chunk: Chunk, data_parallel: int) -> Buffer:
    """Megatron's buffer of a chunk: parameters in reverse order, in its gradient buckets, which are padded.

    Each bucket is padded until the data-parallel ranks divide it evenly; tied embeddings have a bucket of their own.
    """
    buckets: list[list[int]] = [[]]
    for parameter in reversed(chunk):
        if parameter.shared and buckets[-1]:
            buckets.append([])
        buckets[-1].append(parameter.elements)
        if parameter.shared:
            buckets.append([])
    multiple = math.lcm(data_parallel, _BUCKET_END)
    elements, owned = 0, [0] * data_parallel
    for bucket in filter(None, buckets):
        starts = _starts(bucket)
        length = _rounded_up(starts[-1] + bucket[-1], multiple)
        elements += length
        shards = _overlaps(zip(starts, bucket, strict=True), length // data_parallel, data_parallel)
        owned = [sum(pair) for pair in zip(owned, shards, strict=True)]
    return Buffer(elements, tuple(owned))


def _starts(sizes: Sequence[int]) -> list[int]:
    aligned = accumulate((_rounded_up(size, _PARAMETER_START) for size in sizes[:-1]), initial=0)
    return list(aligned)


def _overlaps(pieces: Iterable[tuple[int, int]], shard: int, shards: int) -> list[int]:
    """Elements of pieces (start, length) in each of so many shards of equal length."""
    counts = [0] * shards
    for start, length in pieces:
        for index in range(start // shard, min((start + length - 1) // shard, shards - 1) + 1):
            counts[index] += min(start + length, (index + 1) * shard) - max(start, index * shard)
    return counts


def _rounded_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
