"""Slots of KV by request and position, in place of SGLang's csrc/cpu/speculative kernels of these names."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

from torch import Tensor


def assign_req_to_token_pool_cpu(
    requests: Tensor, req_to_token: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, width: int
) -> None:
    """Record new slots of requests at positions `starts` to `ends` (kernels/ops/kvcache, assign_req_to_token_pool)."""
    for own, row, first, last in _spans(requests, starts, ends):
        req_to_token[row, first:last] = slots[own].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    requests: Tensor, req_to_token: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, width: int
) -> None:
    """Fill `slots` with those at positions `starts` to `ends` (kernels/ops/speculative, assign_extend_cache_locs)."""
    for own, row, first, last in _spans(requests, starts, ends):
        slots[own] = req_to_token[row, first:last].to(slots.dtype)


def _spans(requests: Tensor, starts: Tensor, ends: Tensor) -> Iterator[tuple[slice, int, int, int]]:
    """For each request: its slice of a concatenated array, its row, and its first and end position."""
    done = 0
    for row, first, last in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        yield slice(done, done + last - first), row, first, last
        done += last - first


def assign_draft_cache_locs_contiguous_cpu(
    requests: Tensor, req_to_token: Tensor, lengths: Tensor, slots: Tensor, width: int, branches: int, steps: int
) -> None:
    """Fill `slots` with branches x steps after each request (cache_locs.py, assign_draft_cache_locs_contiguous)."""
    out = slots.view(len(lengths), branches * steps)
    for i, (row, length) in enumerate(zip(requests.tolist(), lengths.tolist(), strict=True)):
        out[i] = req_to_token[row, length : length + branches * steps].to(slots.dtype)


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, requests: Tensor, lengths: Tensor, branches: int, steps: int, width: int
) -> Tensor:
    """CPU version of SGLang's generate_draft_decode_kv_indices.

    Returns the KV slots that each draft branch attends to, [B x branches, width]: first those of the request, then
    those of the branch's own draft tokens.
    """
    found = req_to_token.new_zeros(len(lengths) * branches, width)
    for i, (row, length) in enumerate(zip(requests.tolist(), lengths.tolist(), strict=True)):
        for branch in range(branches):
            into, own = found[i * branches + branch], length + branch * steps
            into[:length] = req_to_token[row, :length]
            last = min(steps, width - length)
            into[length : length + last] = req_to_token[row, own : own + last]
    return found


def copy_all_layer_kv_cache_cpu(addresses: Tensor, row_bytes: Tensor, into: Tensor, out_of: Tensor) -> None:
    """Copy rows between slots of the buffers at these addresses (cache_move.py, copy_all_layer_kv_cache_tiled).

    All rows are read before any is written, since accepted tree nodes move to slots that other nodes leave.
    """
    for address, size in zip(addresses.tolist(), row_bytes.tolist(), strict=True):
        rows = [ctypes.string_at(address + slot * size, size) for slot in out_of.tolist()]
        for slot, row in zip(into.tolist(), rows, strict=True):
            ctypes.memmove(address + slot * size, row, size)
