"""What a transport of buckets is: from pipeline stages to engines, over shared memory, a collective or an object store.

The controller opens a host, sends its `address` (plain, picklable) to the workers, and each worker makes its end:

    address.sender(owner).send(bucket, buffer)                      in the process that gathers a stage's buckets
    address.receiver(index).receive(bucket) -> uint8 [bucket.bytes] in each engine, index 0 .. receivers - 1

Buckets are sent one after the other, in the same order everywhere. What `receive` returns is valid until the next
`receive` or `close` of that receiver. Whoever waits longer than the deadline raises RunError.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from rlhfspec_mega.resharding.buckets import Bucket


class Sender(Protocol):
    """The end of a transport in the process that holds an owner's buckets."""

    def send(self, bucket: Bucket, buffer: Tensor) -> None:
        """Send `buffer[:bucket.bytes]` (uint8, any device); the buffer may be reused on return."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """The end of a transport in an engine."""

    def receive(self, bucket: Bucket) -> Tensor:
        """Wait for `bucket`; returns its uint8 bytes, valid until the next call."""
        ...

    def close(self) -> None: ...


class Host(Protocol):
    """The driver's part of a transport; `address` is what workers make their ends from."""

    address: Any

    def drop(self, receiver: int) -> None:
        """A receiver has died: senders no longer wait for it. Where the transport cannot do without it, all waits end.

        May be said again, and after `close`.
        """
        ...

    def close(self) -> None:
        """Whoever still waits at an end raises RunError, and so does whoever makes one later. Safe to call twice."""
        ...


class OpenHost(Protocol):
    """Opens the transport that this run was configured for."""

    def __call__(self, owners: int, receivers: int, slot_bytes: int, device: str) -> Host: ...
