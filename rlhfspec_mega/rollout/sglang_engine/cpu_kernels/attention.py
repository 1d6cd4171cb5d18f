"""Attention over the KV slots of requests, in place of SGLang's csrc/cpu/decode.cpp and extend.cpp; hooks around it.

Arguments have the order of the operators torch.ops.sgl_kernel.*; those not mentioned are not used here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """[B, T, H, D] for queries [B, T, H, D], keys and values [B, S, KVH, D], visible bool [B, T, S]."""
    queries, keys, values = (one.transpose(1, 2) for one in (q, k, v))
    found = scaled_dot_product_attention(
        queries, keys, values, attn_mask=visible[:, None], scale=scale, enable_gqa=queries.shape[1] != keys.shape[1]
    )
    return found.transpose(1, 2)


def decode_attention_cpu(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    out: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    new_slots: Tensor,
    scratch: Tensor,
    req_to_token: Tensor,
    requests: Tensor,
    lengths: Tensor,
    scale: float,
    logit_cap: float,
    is_cross: bool,
    window: int,
    encoder_lengths: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Attention of one new token per request (decode.cpp, decode_attention_cpu).

    Stores its KV, then attends to the request.

    Args:
        q, out: [B, H, D].
        k_buffer, v_buffer: [slots, KVH, D] of one layer.
        k, v: KV of the new tokens, for `new_slots` [B]; None: already stored.
        req_to_token: slots by request and position.
        requests, lengths: [B] rows of req_to_token, and numbers of positions including the new one.
    """
    _refuse(logit_cap, is_cross, window, sinks)
    if k is not None and v is not None:
        k_buffer[new_slots] = k.view(len(new_slots), *k_buffer.shape[1:]).to(k_buffer.dtype)
        v_buffer[new_slots] = v.view(len(new_slots), *v_buffer.shape[1:]).to(v_buffer.dtype)
    slots, there = _slots(req_to_token, requests, lengths)
    out.copy_(attend(q[:, None], k_buffer[slots], v_buffer[slots], there[:, None], scale)[:, 0])


def extend_attention_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    req_to_token: Tensor,
    requests: Tensor,
    lengths: Tensor,
    extends: Tensor,
    starts: Tensor,
    longest_extend: int,
    scale: float,
    logit_cap: float,
    is_cross: bool,
    window: int,
    encoder_lengths: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
) -> None:
    """Attention of several new tokens per request, whose KV is already stored (extend.cpp, extend_attention_cpu).

    Args:
        q, out: [sum of extends, H, D], request by request.
        lengths: [B] numbers of positions including the new ones.
        extends, starts: [B] new tokens of each request, and where they begin in `q`.
        tree_mask: bool, flat, extend x extend for each request: which of its new tokens each of them sees; None: the
            earlier ones.
    """
    _refuse(logit_cap, is_cross, window, sinks)
    slots, there = _slots(req_to_token, requests, lengths)
    counts = extends.tolist()
    batch, most, width = len(counts), max(counts), slots.shape[1]
    queries = q.new_zeros(batch, most, *q.shape[1:])
    # Padding queries see one position, since a softmax over nothing is not a number.
    visible = there[:, None].expand(batch, most, width).clone()
    done = 0
    for row, (count, start, length) in enumerate(zip(counts, starts.tolist(), lengths.tolist(), strict=True)):
        queries[row, :count] = q[start : start + count]
        if tree_mask is None:
            own = torch.ones(count, count, dtype=torch.bool).tril()
        else:
            own = tree_mask[done : done + count * count].view(count, count).bool()
        visible[row, :count, length - count : length] = own
        done += count * count
    found = attend(queries, k_buffer[slots], v_buffer[slots], visible, scale)
    for row, (count, start) in enumerate(zip(counts, starts.tolist(), strict=True)):
        out[start : start + count] = found[row, :count]


def _slots(req_to_token: Tensor, requests: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Slots int64 [B, longest] of requests, and a mask of the valid ones; padding repeats a request's last slot.

    Another request's slot, or an unused one, may hold values that are not numbers, which even a weight of 0 would pass
    on.
    """
    places = torch.arange(int(lengths.max()))
    there = places < lengths[:, None]
    return req_to_token[requests[:, None], places.minimum(lengths[:, None] - 1)].long(), there


def _refuse(logit_cap: float, is_cross: bool, window: int, sinks: Any) -> None:
    if logit_cap > 0 or is_cross or window > 0 or sinks is not None:
        raise NotImplementedError(
            "These stand-ins for SGLang's CPU kernels have no soft cap, cross attention, sliding window or sinks: no "
            "model of this project has them."
        )


def decode_prepared_lengths(original: Callable[..., Tensor], backend: Any, *given: Any, **named: Any) -> Tensor:
    """Hook around IntelAMXAttnBackend.forward_decode, which prepares each draft layer's lengths but reads others."""
    if backend.draft_decode_metadata is not None:
        given = _with_lengths(backend.draft_decode_metadata[1], *given)
    return original(backend, *given, **named)


def extend_prepared_lengths(original: Callable[..., Tensor], backend: Any, *given: Any, **named: Any) -> Tensor:
    """Hook around IntelAMXAttnBackend.forward_extend, which has the same fault in verification."""
    return original(backend, *_with_lengths(backend.extend_metadata[0], *given), **named)


def _with_lengths(lengths: Tensor, q: Any, k: Any, v: Any, layer: Any, batch: Any, *rest: Any) -> tuple[Any, ...]:
    return (q, k, v, layer, _WithLengths(batch, lengths), *rest)


class _WithLengths:
    """A batch with other sequence lengths."""

    def __init__(self, batch: Any, lengths: Tensor) -> None:
        self._batch, self.seq_lens = batch, lengths

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)
