"""The interface of a transport of buckets from pipeline stages to engines.

The controller opens a host and sends its `address` (plain, picklable) to the workers, which create the two ends:

    address.sender(owner).send(bucket, buffer)                      in the process that gathers a stage's buckets
    address.receiver(index).receive(bucket) -> uint8 [bucket.bytes] in each engine, index 0 .. receivers - 1

Buckets are sent one after the other, in the same order everywhere. The result of `receive` is valid until the next
`receive` or `close` of that receiver. An end that waits longer than the deadline raises RunError.
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
    """The end of a transport in an engine's process."""

    def receive(self, bucket: Bucket) -> Tensor:
        """Wait for `bucket`; returns its uint8 bytes, valid until the next call."""
        ...

    def close(self) -> None: ...


class Host(Protocol):
    """The driver's part of a transport; workers create their ends from its `address`."""

    address: Any

    def drop(self, receiver: int) -> None:
        """Stop waiting for a receiver that has died; cancels all waits if the transport cannot continue without it.

        May be repeated, and called after `close`.
        """
        ...

    def close(self) -> None:
        """Ends that wait, now or later, and ends created from now on raise RunError. Safe to call twice."""
        ...


class OpenHost(Protocol):
    """Opens the configured transport."""

    def __call__(self, owners: int, receivers: int, slot_bytes: int, device: str) -> Host: ...
