"""Peak bytes of activations while Megatron trains, tensor by tensor, of the layers that megatron/layers.py builds.

Measured against a count of all tensors' bytes on the CPU. On a GPU Transformer Engine's fused kernels keep less, so
there the figures are an upper bound that nobody has measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhfspec_mega.models.shape import ModelShape, padded_vocab_size

_FORWARD_COPIES, _BACKWARD_COPIES = 17, 12  # bytes per score of a chunk (4 1/4 and 3 fp32 copies), besides the logits
_VALUE_HEAD = 8  # bytes per hidden number: the head's fp32 copy and its gradient
_NORM_PASS = 24  # bytes per hidden number that a norm's backward pass has, what it saved included


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass of a pipeline stage.

    Attributes:
        tokens: of the micro-batch, padding included.
        rows: its sequences; each layer keeps the rotary embedding of the positions of one.
        chunk: tokens whose fp32 logits exist at the same time.
        size: bytes per number of the model's precision.
        layers: of a model chunk of this stage.
        first, last: whether the stage has the embedding, and the output layer.
        kept: micro-batches whose activations the stage keeps at most, by Megatron's schedule.
    """

    tokens: int
    rows: int
    tensor_parallel: int
    sequence_parallel: bool
    recompute: bool
    chunk: int
    size: int
    layers: int
    first: bool = True
    last: bool = True
    kept: int = 1


def peak_bytes(shape: ModelShape, one: Pass) -> int:
    """The largest number of bytes beside weights, gradients and optimizer on a rank.

    It is reached at one of these moments of the backward pass, whichever takes most:
        head    logits, their gradient or a transposed copy, and the fp32 copies of a chunk;
                later that gradient, its transposed copy and the gradient of the output layer's weight
        norm    the final norm, whose backward pass computes in fp32
        layer   the feed-forward part of the last layer: gradients of its input, and of gate and up
        end     the gradient of the embedding, which for a tied one is added to the output layer's

    Beside them all layers' saved activations are there, or with recompute their inputs and one layer's activations, for
    every micro-batch that the schedule keeps.
    """
    size, tokens = one.size, one.tokens
    split, stream, layer = _per_token(shape, one)
    norm = _norm(shape.hidden_size, size) / split
    kept = kept_bytes(shape, one)
    ffn = shape.ffn_size // one.tensor_parallel * size
    inside = (4.5 if size == 4 else 4.25) * shape.hidden_size + max(2 * ffn, ffn + ffn * shape.hidden_size / tokens)
    inside += layer if one.recompute else 0
    moments = [inside]
    rows = padded_vocab_size(shape.vocab_size, one.tensor_parallel) // one.tensor_parallel
    weight = rows * shape.hidden_size * size / tokens
    if one.last and shape.value_head:
        moments += [norm + _VALUE_HEAD * shape.hidden_size / split, _NORM_PASS * shape.hidden_size / split]
    elif one.last:
        chunk = min(one.chunk, tokens) / tokens
        head = max(rows * size + _FORWARD_COPIES * rows * chunk, 2 * rows * size + _BACKWARD_COPIES * rows * chunk)
        waiting = weight if shape.tie_embeddings and one.first else 0  # until the embedding's own gradient is there
        gradients = 2 if one.rows > 1 else 1  # Megatron transposes [length, rows] and back, which for one row is a view
        moments = [inside + waiting, norm + head, norm + gradients * rows * size + weight]
        moments += [_NORM_PASS * shape.hidden_size / split + waiting]
    peak = tokens * max((one.kept - 1) * kept + kept + max(moments), 0)
    if one.first:
        end = (3 if shape.tie_embeddings and one.last else 1) * weight * tokens
        peak = max(peak, end + tokens * ((one.kept - 1) * kept + 2 * stream))
    return round(peak)


def kept_bytes(shape: ModelShape, one: Pass) -> float:
    """Bytes per token that all layers of a stage keep from the forward of a micro-batch to its backward."""
    _, stream, layer = _per_token(shape, one)
    return one.layers * (stream if one.recompute else layer)


def _per_token(shape: ModelShape, one: Pass) -> tuple[int, float, float]:
    """Ranks that divide the residual stream; bytes per token of that stream, and of a layer's saved activations."""
    split = one.tensor_parallel if one.sequence_parallel else 1
    norm = _norm(shape.hidden_size, one.size) / split
    ffn = 5 * shape.ffn_size // one.tensor_parallel * one.size
    return split, shape.hidden_size * one.size / split, 2 * norm + _attention(shape, one) + ffn


def _norm(width: int, size: int) -> int:
    """Bytes per token that an RMSNorm over `width` numbers keeps: its input in fp32, both its results, a scale."""
    return width * (4 + 2 * size) + 4


def _attention(shape: ModelShape, one: Pass) -> float:
    """Bytes per token: queries, keys and values as the kernel reads them, its result and scale, and the rotary part.

    With fewer key-value heads than heads, keys and values are repeated; otherwise the values are a view of the joint
    projection, all of which is kept.
    """
    heads, kv = shape.num_heads // one.tensor_parallel, shape.num_kv_heads // one.tensor_parallel
    width, joint = shape.head_dim, (heads + 2 * kv) * shape.head_dim
    numbers = 4 * heads * width if kv < heads else 3 * heads * width + joint
    fp32 = heads
    if shape.qk_norm:
        numbers += (heads + kv) * width
        if one.size == 4:
            numbers += joint if kv < heads else 0
        else:
            fp32 += (heads + kv) * width
        fp32 += heads + kv
    return numbers * one.size + 4 * fp32 + 4 * width * one.size / one.rows
