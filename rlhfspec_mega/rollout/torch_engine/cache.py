"""Slot KV cache: one preallocated tensor whose first slots are the active ones, so that decoding gathers nothing."""

from __future__ import annotations

import torch

from rlhfspec_mega.models.shape import ModelShape


class KVCache:
    """Keys and values [layers, 2, slots, kv_heads, positions, head_dim]; the 2 is (key, value)."""

    def __init__(
        self, shape: ModelShape, *, slots: int, positions: int, dtype: torch.dtype, device: torch.device | str
    ):
        size = (shape.num_layers, 2, slots, shape.num_kv_heads, positions, shape.head_dim)
        self.kv = torch.zeros(size, dtype=dtype, device=device)
        self.scale = shape.head_dim**-0.5
        self.heads = shape.num_heads

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        self.kv[:, :, target, :, :length] = self.kv[:, :, source, :, :length]

    def fill(self, first: int, count: int, prefix: torch.Tensor) -> None:
        """Copy `prefix` [layers, 2, kv_heads, length, head_dim] to `count` slots from `first` on."""
        self.kv[:, :, first : first + count, :, : prefix.shape[3]] = prefix.unsqueeze(2)

    def prefix(self, slot: int, length: int) -> torch.Tensor:
        """View [layers, 2, kv_heads, length, head_dim] of a slot's first positions."""
        return self.kv[:, :, slot, :, :length]


class CachedAttention:
    """Attention of Q input tokens in each of the first B slots over those slots' cached positions.

    Args:
        positions: int64 [B, Q], where the inputs' keys and values are written.
        visible: bool [B, Q, L] (or broadcastable), which of the first L positions each input attends to.

    Plain matrix products: at one query token per sample they beat the fused kernels on a CPU.
    """

    def __init__(self, cache: KVCache, positions: torch.Tensor, visible: torch.Tensor):
        batch, inputs = positions.shape
        kv_heads = cache.kv.shape[3]
        self._cache = cache
        self._shape = (batch, inputs, kv_heads, cache.heads // kv_heads)
        self._length = visible.shape[-1]
        self._positions = positions
        self._rows = torch.arange(batch, device=positions.device)[:, None]
        bias = torch.zeros(visible.shape, dtype=cache.kv.dtype, device=visible.device)
        bias.masked_fill_(~visible, float("-inf"))
        # One row of scores per (kv head, head of its group, input): the order of `_fold`.
        full = (batch, kv_heads, self._shape[3], inputs, self._length)
        self._bias = bias[:, None, None].expand(full).reshape(batch * kv_heads, -1, self._length)

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """See `models.transformer.Attention`."""
        batch, inputs, kv_heads, group = self._shape
        kv = self._cache.kv[layer]
        new = qkv[:, :, self._cache.heads :].unflatten(2, (2, kv_heads))
        kv[:, self._rows, :, self._positions] = new
        keys, values = kv[:, :batch, :, : self._length].flatten(1, 2)
        queries = qkv[:, :, : self._cache.heads].unflatten(2, (kv_heads, group))
        queries = queries.permute(0, 2, 3, 1, 4).reshape(batch * kv_heads, group * inputs, -1)
        scores = torch.baddbmm(self._bias, queries, keys.transpose(1, 2), alpha=self._cache.scale)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype)
        mixed = torch.bmm(weights, values).view(batch, kv_heads, group, inputs, -1)
        return mixed.permute(0, 3, 1, 2, 4).flatten(2, 3)
