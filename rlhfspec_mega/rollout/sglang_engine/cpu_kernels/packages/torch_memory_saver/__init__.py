"""Replaces torch_memory_saver, which exists for CUDA only: released memory is filled with not-a-number values.

So any use of released memory shows up in results. No memory is saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode

POISON = 0xFF  # a byte of not-a-number in every floating-point type


class _Recorder(TorchDispatchMode):
    """Records the storages of all tensors created inside it."""

    def __init__(self, found: WeakValueDictionary[int, Any]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # Views, changes in place and results written to `out=` allocate nothing.
        known = {storage.data_ptr() for storage in _storages((*args, *kwargs.values()))}
        for storage in _storages(result if isinstance(result, tuple | list) else (result,)):
            if storage.data_ptr() not in known:
                self._found.setdefault(storage.data_ptr(), storage)
        return result


class _MemorySaver:
    """Memory regions by tag."""

    enabled = True

    def __init__(self) -> None:
        self._regions: dict[tuple[str, bool], WeakValueDictionary[int, Any]] = {}
        self._backups: dict[tuple[str, int], torch.Tensor] = {}

    @contextmanager
    def region(self, tag: str = "default", enable_cpu_backup: bool = False) -> Iterator[None]:
        with _Recorder(self._regions.setdefault((tag, enable_cpu_backup), WeakValueDictionary())):
            yield

    @contextmanager
    def cuda_graph(self, **named: Any) -> Iterator[None]:
        yield

    @contextmanager
    def disable(self) -> Iterator[None]:
        yield

    def pause(self, tag: str) -> None:
        """Release the regions with this tag."""
        for (own, backed_up), storages in self._regions.items():
            for place, storage in storages.items() if own == tag else ():
                content = _bytes(storage)
                if backed_up:
                    self._backups[tag, place] = content.clone()
                content.fill_(POISON)

    def resume(self, tag: str) -> None:
        """Take the regions with this tag back; those with a backup get their contents back."""
        for (own, _), storages in self._regions.items():
            for place, storage in storages.items() if own == tag else ():
                if (backup := self._backups.pop((tag, place), None)) is not None:
                    _bytes(storage).copy_(backup)


def _storages(values: Any) -> list[Any]:
    """Storages of those of these tensors that are in host memory."""
    return [one.untyped_storage() for one in values if isinstance(one, torch.Tensor) and one.device.type == "cpu"]


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


torch_memory_saver = _MemorySaver()


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """Nothing to do; the real package makes child processes preload its allocator."""
    yield
