"""KV cache by slots, and attention over it. The active slots are the first ones, so that decoding needs no gather."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from rlhfspec_mega.compiled import COMPILES, compiled
from rlhfspec_mega.draft.shape import DraftShape
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.tree import Ints


class Inputs(NamedTuple):
    """N input tokens of the first `batch` slots, ordered by row, then column.

    Attributes:
        tokens: int64 [N].
        positions: int64 [N], position in the sequence, for the rotary embedding.
        rows: int64 [N], the slot.
        columns: int64 [N], number among the inputs of the row, from 0.
        places: int64 [N], index in the slot's cache where the key and value are written.
        visible: bool [N, L], which of the first L places an input attends to.
        batch: number of rows, with or without inputs.
        queries: most inputs of a row.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    places: torch.Tensor
    visible: torch.Tensor
    batch: int
    queries: int


class KVCache:
    """Keys and values [layers, 2, slots, kv_heads, places, head_dim]; the 2 is (key, value).

    A "place" is an index along the sequence dimension of a slot. A committed token's place is its position; draft
    tokens are behind all committed ones until they are accepted or overwritten.
    """

    def __init__(
        self,
        shape: ModelShape | DraftShape,
        *,
        slots: int,
        places: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        size = (shape.num_layers, 2, slots, shape.num_kv_heads, places, shape.head_dim)
        self.kv = torch.zeros(size, dtype=dtype, device=device)
        on_host = COMPILES and self.kv.device.type == "cpu"
        self._words = self.kv.view(torch.int32).numpy() if on_host else None  # the same memory
        self.scale = shape.head_dim**-0.5
        self.heads = shape.num_heads

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` places of one slot to another."""
        self.kv[:, :, target, :, :length] = self.kv[:, :, source, :, :length]

    def fill(self, first: int, count: int, prefix: torch.Tensor) -> None:
        """Copy `prefix` [layers, 2, kv_heads, length, head_dim] to `count` slots from `first` on."""
        self.kv[:, :, first : first + count, :, : prefix.shape[3]] = prefix.unsqueeze(2)

    def write(self, layer: int, rows: torch.Tensor, places: torch.Tensor, entries: torch.Tensor) -> None:
        """Put keys and values [N, 2 * kv_heads, head_dim] at places [N] of slots [N]."""
        self.kv[layer][:, rows, :, places] = entries.unflatten(1, (2, self.kv.shape[3]))

    def prefix(self, slot: int, length: int) -> torch.Tensor:
        """View [layers, 2, kv_heads, length, head_dim] of a slot's first places."""
        return self.kv[:, :, slot, :, :length]

    def commit(self, rows: Ints, sources: Ints, targets: Ints) -> None:
        """Move accepted draft tokens to their positions: from place sources[i] of slot rows[i] to place targets[i].

        Of a row, no place may be written before it is read: places of targets and sources ascend, and a target is not
        behind its source.
        """
        if self._words is not None:
            _move_places(self._words, rows, sources, targets)
            return
        at, read, written = (torch.from_numpy(array).to(self.kv.device) for array in (rows, sources, targets))
        self.kv[:, :, at, :, written] = self.kv[:, :, at, :, read]


@compiled
def _move_places(words: NDArray[np.int32], rows: Ints, sources: Ints, targets: Ints) -> None:
    layers, parts, _, heads, _, width = words.shape
    for layer in range(layers):
        for part in range(parts):
            for one in range(len(rows)):
                for head in range(heads):
                    places = words[layer, part, rows[one], head]
                    source, target = sources[one], targets[one]
                    for word in range(width):
                        places[target, word] = places[source, word]


class CachedAttention:
    """Attention of flat inputs over their slots' cached places; implements `models.transformer.Attention`.

    The projections of a forward pass work on the flat tokens; only attention pads rows with fewer inputs. It uses plain
    matrix products, which with one query token per sample are as fast as the fused kernel, except in bfloat16 on a CPU,
    where the fused kernel takes a half to a quarter of the time.
    """

    def __init__(self, cache: KVCache, inputs: Inputs):
        count, self._length = inputs.visible.shape
        self._cache, self._inputs = cache, inputs
        batch, queries, kv_heads = inputs.batch, inputs.queries, cache.kv.shape[3]
        self._sizes = (batch, queries, kv_heads, cache.heads // kv_heads)
        self._spread = None if count == batch * queries else inputs.rows * queries + inputs.columns
        bias = torch.zeros(inputs.visible.shape, dtype=cache.kv.dtype, device=inputs.visible.device)
        bias.masked_fill_(~inputs.visible, float("-inf"))
        # One row of scores per (kv head, head of its group, input): the order of the folded queries below.
        full = (batch, kv_heads, self._sizes[3], queries, self._length)
        padded = self._pad(bias).view(batch, 1, 1, queries, self._length)
        self._bias = padded.expand(full).reshape(batch * kv_heads, -1, self._length)

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """[N, heads + 2 * kv_heads, head_dim] -> [N, heads, head_dim]; caches the new keys and values."""
        batch, queries, kv_heads, group = self._sizes
        heads = self._cache.heads
        self._cache.write(layer, self._inputs.rows, self._inputs.places, qkv[:, heads:])
        keys, values = self._cache.kv[layer][:, :batch, :, : self._length].flatten(1, 2)
        folded = self._pad(qkv[:, :heads]).view(batch, queries, kv_heads, group, -1)
        folded = folded.permute(0, 2, 3, 1, 4).reshape(batch * kv_heads, group * queries, -1)
        mixed = self._attend(folded, keys, values).view(batch, kv_heads, group, queries, -1)
        mixed = mixed.permute(0, 3, 1, 2, 4).reshape(batch * queries, heads, -1)
        return mixed if self._spread is None else mixed[self._spread]

    def _attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[B, Q, head_dim] queries over [B, length, head_dim] keys and values, B = batch x kv_heads."""
        bias, scale = self._bias, self._cache.scale
        if values.dtype == torch.bfloat16 and values.device.type == "cpu":
            # Only inputs with four dimensions take the fused kernel.
            q, k, v, mask = (tensor.unsqueeze(0) for tensor in (queries, keys, values, bias))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)[0]
        scores = torch.baddbmm(bias, queries, keys.transpose(1, 2), alpha=scale)
        return torch.bmm(scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype), values)

    def _pad(self, flat: torch.Tensor) -> torch.Tensor:
        """[N, ...] -> [batch * queries, ...], padded with 0; as a bias, 0 hides nothing from padded queries."""
        if self._spread is None:
            return flat.contiguous()
        padded = flat.new_zeros(self._sizes[0] * self._sizes[1], *flat.shape[1:])
        padded[self._spread] = flat
        return padded
