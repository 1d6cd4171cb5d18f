"""Transport of buckets on one host: two slots of anonymous shared memory, written by a stage, read by every engine."""

from __future__ import annotations

import mmap
import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.resharding.buckets import Bucket

_SLOTS = 2  # the next bucket is gathered and sent while engines load the last one
# Bytes, as 64-bit words: [sent, bucket id in slot 0, in slot 1, closed, released by receiver 0, by 1, ...]
_HEADER = 4096
_CLOSED = 1 + _SLOTS
_RELEASED = _CLOSED + 1
_FOREVER = 2**62  # more buckets than any run sends
_MAX_RECEIVERS = _HEADER // 8 - _RELEASED


class SharedMemoryHost:
    """Owns anonymous shared memory (memfd): it has no name to clean up, and the kernel frees it with its last process.

    Unlike /dev/shm it is not limited by a container's small tmpfs. Workers open it through /proc of this process, which
    must stay alive until all of them have opened it.
    """

    def __init__(self, slot_bytes: int, receivers: int, deadline: float) -> None:
        """Reserve two slots of `slot_bytes`. Raises UserError for more memory than the host has free."""
        if receivers > _MAX_RECEIVERS:
            raise UserError(f"Shared memory serves {_MAX_RECEIVERS} engines: use resharding.transport=collective.")
        size = _HEADER + _SLOTS * slot_bytes
        available = psutil.virtual_memory().available
        if size > available:
            raise UserError(
                f"Resharding needs {size / 2**20:.0f} MiB of shared memory for {_SLOTS} buckets, this host has "
                f"{available / 2**20:.0f} MiB free: lower resharding.bucket_mib."
            )
        self._descriptor = os.memfd_create("rlhfspec_mega.resharding")
        os.ftruncate(self._descriptor, size)
        self.address = SharedMemoryAddress(os.getpid(), self._descriptor, slot_bytes, receivers, deadline)
        self._memory: _Memory | None = _Memory(self.address)

    def drop(self, receiver: int) -> None:
        """Count all buckets, including future ones, as released by this receiver."""
        if self._memory is not None:
            self._memory.release(receiver, _FOREVER)

    def close(self) -> None:
        """Refuse further ends; ends that wait, now or later, raise RunError. Safe to call twice."""
        if self._memory is not None:
            self._memory.closed = True
            self._memory = None
            os.close(self._descriptor)


@dataclass(frozen=True)
class SharedMemoryAddress:
    """Where workers of this host find the memory. `deadline` in seconds."""

    pid: int
    descriptor: int
    slot_bytes: int
    receivers: int
    deadline: float

    def sender(self, owner: int) -> SharedMemorySender:
        """The sender of the stage `owner`; all stages write to the same slots in turn."""
        return SharedMemorySender(_Memory(self, pinned=torch.cuda.is_initialized()))

    def receiver(self, index: int) -> SharedMemoryReceiver:
        return SharedMemoryReceiver(_Memory(self, pinned=torch.cuda.is_initialized()), index)


class _Memory:
    """The mapped header and slots. Counters only grow: bucket number n (over all updates) is in slot n % 2.

    Args:
        pinned: pin the memory where possible, so that this process's GPUs copy at full speed.
    """

    def __init__(self, address: SharedMemoryAddress, pinned: bool = False) -> None:
        self.address = address
        try:
            descriptor = os.open(f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDWR)
        except OSError as error:
            raise RunError(
                f"The shared memory of process {address.pid} cannot be opened ({error.strerror}): sender and engines "
                "must run on one host under one user; between hosts or containers use resharding.transport=collective."
            ) from None
        try:
            memory = mmap.mmap(descriptor, _HEADER + _SLOTS * address.slot_bytes)
        finally:
            os.close(descriptor)
        self._header = memoryview(memory)[:_HEADER].cast("q")
        self._slots = torch.frombuffer(memory, dtype=torch.uint8, offset=_HEADER).view(_SLOTS, address.slot_bytes)
        if pinned:
            cuda = torch.cuda.cudart()
            start = self._slots.data_ptr() - _HEADER  # start of a memory page
            if int(cuda.cudaHostRegister(start, len(memory), 0)) == 0:
                weakref.finalize(self, cuda.cudaHostUnregister, start)
            else:
                with suppress(RuntimeError):  # otherwise the next CUDA call would report it
                    torch.zeros(1, device="cuda")

    @property
    def sent(self) -> int:
        return self._header[0]

    @sent.setter
    def sent(self, count: int) -> None:
        self._header[0] = count

    def slot(self, number: int) -> Tensor:
        return self._slots[number % _SLOTS]

    def bucket_id(self, number: int) -> int:
        return self._header[1 + number % _SLOTS]

    def set_bucket_id(self, number: int, bucket_id: int) -> None:
        self._header[1 + number % _SLOTS] = bucket_id

    @property
    def closed(self) -> bool:
        """Whether the host is closed, so that waiting is useless."""
        return bool(self._header[_CLOSED])

    @closed.setter
    def closed(self, value: bool) -> None:
        self._header[_CLOSED] = value

    def released(self) -> list[int]:
        """Number of buckets that each receiver has released."""
        return self._header[_RELEASED : _RELEASED + self.address.receivers].tolist()

    def release(self, receiver: int, count: int) -> None:
        """Mark the first `count` buckets as released by the receiver.

        Never lowers the mark: that of a receiver that was dropped, because it is dead, is at its maximum.
        """
        self._header[_RELEASED + receiver] = max(self._header[_RELEASED + receiver], count)

    def wait(self, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Poll with growing pauses (50 us to 2 ms).

        Raises RunError with `what()` after the deadline or if the host closes.
        """
        end, pause = time.monotonic() + self.address.deadline, 5e-5
        while not ready():
            if self.closed:
                raise RunError(f"{what()}: the transport was closed, as when another worker has died.")
            if time.monotonic() > end:
                raise RunError(f"{what()} within {self.address.deadline:g} s: look for a dead or stuck worker.")
            time.sleep(pause)
            pause = min(2 * pause, 2e-3)


class SharedMemorySender:
    """Writes buckets into slots, after every receiver has released the slot's previous bucket."""

    def __init__(self, memory: _Memory) -> None:
        self._memory = memory

    def send(self, bucket: Bucket, buffer: Tensor) -> None:
        memory = self._memory
        if bucket.bytes > memory.address.slot_bytes:
            raise RunError(f"Bucket {bucket.id} of {bucket.bytes} bytes exceeds the slot: {memory.address.slot_bytes}.")
        number = memory.sent
        oldest = number - _SLOTS  # the previous bucket of this slot
        memory.wait(
            lambda: min(memory.released()) > oldest,
            lambda: (
                f"Bucket {bucket.id} found no free slot, engines "
                f"{[i for i, count in enumerate(memory.released()) if count <= oldest]} did not take bucket {oldest}"
            ),
        )
        memory.slot(number)[: bucket.bytes].copy_(buffer[: bucket.bytes])
        memory.set_bucket_id(number, bucket.id)
        memory.sent = number + 1  # written last: receivers wait for it

    def close(self) -> None:
        """Nothing to do: the mapping is freed with the last tensor that refers to it."""


class SharedMemoryReceiver:
    """Hands out views of the slots. Made before the first bucket is sent."""

    def __init__(self, memory: _Memory, index: int) -> None:
        self._memory = memory
        self._index = index
        self._received = 0

    def receive(self, bucket: Bucket) -> Tensor:
        memory = self._memory
        number = self._received
        memory.release(self._index, number)
        memory.wait(lambda: memory.sent > number, lambda: f"Engine {self._index} did not get bucket {bucket.id}")
        if memory.bucket_id(number) != bucket.id:
            raise RunError(
                f"Engine {self._index} got bucket {memory.bucket_id(number)} instead of {bucket.id}: "
                "sender and engines follow different plans."
            )
        self._received = number + 1
        return memory.slot(number)[: bucket.bytes]

    def close(self) -> None:
        """Release the last bucket, so that no sender waits for this receiver."""
        self._memory.release(self._index, self._received)
