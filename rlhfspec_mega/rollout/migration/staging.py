"""Staging buffers for migrating KV: shared memory on one machine, else memory of the receiver that messages fill."""

from __future__ import annotations

import math
import mmap
import os
from typing import NamedTuple

import torch

from rlhfspec_mega.errors import RunError


class Layout(NamedTuple):
    """Shapes [layers, 2, kv_heads, positions, head_dim] by part ("target", "draft"), and the dtype's name.

    The dimensions have the order of the KV cache, so that a part is copied in runs of positions x head_dim.
    """

    dtype: str
    parts: dict[str, tuple[int, int, int, int, int]]

    @property
    def bytes(self) -> int:
        return sum(map(self.bytes_of, self.parts))

    def bytes_of(self, part: str) -> int:
        return math.prod(self.parts[part]) * getattr(torch, self.dtype).itemsize

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts in flat uint8 memory."""
        values, found = memory.view(getattr(torch, self.dtype)), {}
        for name, shape in self.parts.items():
            size = math.prod(shape)
            found[name], values = values[:size].view(shape), values[size:]
        return found


class Handle(NamedTuple):
    """Identifies shared memory to another process: it opens /proc/<pid>/fd/<descriptor>."""

    pid: int
    descriptor: int
    layout: Layout


class Staging:
    """A staging buffer for the KV of one sample or one prompt.

    Attributes:
        parts: tensors by part ("target", "draft"), filled from position 0 on.
        handle: with which another process opens the buffer; None for private memory.
    """

    def __init__(self, layout: Layout, memory: torch.Tensor, handle: Handle | None = None) -> None:
        self.parts, self.handle = layout.views(memory), handle

    @classmethod
    def private(cls, layout: Layout) -> Staging:
        """A buffer in the memory of this process."""
        return cls(layout, torch.empty(layout.bytes, dtype=torch.uint8))

    @classmethod
    def shared(cls, layout: Layout) -> Staging:
        """A buffer in anonymous shared memory (memfd), whose unwritten pages take no memory.

        Raises OSError if there is no memory or no file descriptor for it.
        """
        descriptor = os.memfd_create("rlhfspec_mega.migration")
        try:
            os.ftruncate(descriptor, max(layout.bytes, 1))
            return cls(layout, _mapped(descriptor, layout), Handle(os.getpid(), descriptor, layout))
        except OSError:
            os.close(descriptor)
            raise

    @classmethod
    def opened(cls, handle: Handle) -> Staging:
        """The shared buffer of another process. Raises RunError if it cannot be opened, e.g. because it was closed."""
        try:
            descriptor = os.open(f"/proc/{handle.pid}/fd/{handle.descriptor}", os.O_RDWR)
        except OSError as error:
            raise RunError(f"The KV of a migrating sample cannot be opened: {error.strerror}.") from None
        try:
            return cls(handle.layout, _mapped(descriptor, handle.layout))
        except (OSError, ValueError) as error:
            raise RunError(f"The KV of a migrating sample cannot be mapped: {error}.") from None
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Release the buffer; its memory is freed when the other process has released it too.

        Only the process that created the buffer calls this, once.
        """
        self.parts = {}
        if self.handle is not None:
            os.close(self.handle.descriptor)


def _mapped(descriptor: int, layout: Layout) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, max(layout.bytes, 1)), dtype=torch.uint8, count=layout.bytes)
