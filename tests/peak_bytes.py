"""Counts the bytes that tensors take while something runs, on any device: an independent check of memory estimates."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors made inside have taken at one time.

    What an operation allocates and frees inside itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        owned = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if torch.is_tensor(tensor)}
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if torch.is_tensor(tensor) else None
            if storage is None or storage._cdata in self._sizes or storage._cdata in owned:
                continue
            self._sizes[storage._cdata] = storage.nbytes()
            self._now += storage.nbytes()
            weakref.finalize(storage, self._drop, storage._cdata)
        self.peak = max(self.peak, self._now)
        return result

    def _drop(self, key: int) -> None:
        self._now -= self._sizes.pop(key)
