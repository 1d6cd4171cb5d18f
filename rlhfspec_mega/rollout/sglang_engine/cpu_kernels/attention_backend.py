"""Hooks that let SGLang 0.5.17 draft and verify with its attention backend for CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def decode_prepared_lengths(
    original: Callable[..., Tensor],
    backend: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Any,
    batch: Any,
    *rest: Any,
    **named: Any,
) -> Tensor:
    """Around IntelAMXAttnBackend.forward_decode, which prepares each draft layer's lengths and reads others."""
    if backend.draft_decode_metadata is not None:
        batch = _WithLengths(batch, backend.draft_decode_metadata[1])
    return original(backend, q, k, v, layer, batch, *rest, **named)


def extend_prepared_lengths(
    original: Callable[..., Tensor],
    backend: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Any,
    batch: Any,
    *rest: Any,
    **named: Any,
) -> Tensor:
    """Around IntelAMXAttnBackend.forward_extend, which does the same in verification."""
    return original(backend, q, k, v, layer, _WithLengths(batch, backend.extend_metadata[0]), *rest, **named)


class _WithLengths:
    """A batch with other sequence lengths."""

    def __init__(self, batch: Any, lengths: Tensor) -> None:
        self._batch, self.seq_lens = batch, lengths

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)
