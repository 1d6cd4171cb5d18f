"""Transport of buckets between hosts: a broadcast from each pipeline stage to all engines, over gloo or NCCL."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.resharding.buckets import Bucket

_CANCELLED = "cancelled"  # key of a collective's store
_CHECK_SECONDS = 0.2
_BACKLOG = 1024  # workers that may connect at the same moment


class CollectiveHost:
    """Owns the TCP store at which the process groups of a collective transport meet; it listens on `host` alone."""

    def __init__(
        self, host: str, owners: int, receivers: int, slot_bytes: int, deadline: float, device: str = "cpu"
    ) -> None:
        """Listen on a free port of `host`, an address of this machine that all workers can reach."""
        self._store: dist.TCPStore | None = listening_store(host, deadline)
        self.address = CollectiveAddress(host, self._store.port, owners, receivers, slot_bytes, deadline, device)

    def drop(self, receiver: int) -> None:
        """A collective cannot go on without a member: end it for all, so that the others need not wait."""
        if self._store is not None:
            self._store.set(_CANCELLED, str(receiver))

    def close(self) -> None:
        self._store = None


@dataclass(frozen=True)
class CollectiveAddress:
    """Where members meet. `owners`: number of pipeline stages; `deadline` in seconds; `device`: cpu (gloo) or cuda.

    Each owner has a process group of its own with all receivers: a bucket passes only through those that need it, and
    the default process group of either side is not touched.
    """

    host: str
    port: int
    owners: int
    receivers: int
    slot_bytes: int
    deadline: float
    device: str = "cpu"

    def sender(self, owner: int) -> CollectiveSender:
        """Blocks until all receivers are made; senders and receivers are made at the same time."""
        return CollectiveSender(_Broadcasts(self, owner, 0))

    def receiver(self, index: int) -> CollectiveReceiver:
        """Blocks until all senders and receivers are made."""
        return CollectiveReceiver(self, [_Broadcasts(self, owner, index + 1) for owner in range(self.owners)])


class _Broadcasts:
    """One member of an owner's process group: the sender is rank 0, receiver i is rank i + 1."""

    def __init__(self, address: CollectiveAddress, owner: int, rank: int) -> None:
        self.address = address
        timeout = timedelta(seconds=address.deadline)
        try:
            self._store = dist.TCPStore(address.host, address.port, is_master=False, timeout=timeout)
            prefixed = dist.PrefixStore(f"resharding/{owner}", self._store)
            self._group: Any
            if address.device == "cpu":
                self._group = dist.ProcessGroupGloo(prefixed, rank, address.receivers + 1, timeout)
            else:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._group = dist.ProcessGroupNCCL(prefixed, rank, address.receivers + 1, options)
        except RuntimeError as error:
            raise RunError(
                f"The resharding group of pipeline stage {owner} did not form at {address.host}:{address.port} "
                f"within {address.deadline:g} s ({_first_line(error)})."
            ) from None

    def broadcast(self, bucket: Bucket, data: Tensor) -> None:
        """Take part in the broadcast of `data`. Raises RunError when it fails, takes too long, or was cancelled."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        try:
            work = self._group.broadcast([data], options)
            self._wait(work, bucket)
            work.wait()
        except RuntimeError as error:
            raise RunError(
                f"Bucket {bucket.id} of pipeline stage {bucket.owner} was not broadcast within "
                f"{self.address.deadline:g} s: look for a dead or stuck worker ({_first_line(error)})."
            ) from None

    def _wait(self, work: Any, bucket: Bucket) -> None:
        """Poll rather than block: members of a collective do not learn by themselves that one of them has died."""
        pause, next_check = 5e-5, time.monotonic() + _CHECK_SECONDS
        while not work.is_completed():
            if time.monotonic() > next_check:
                next_check = time.monotonic() + _CHECK_SECONDS
                if self._store.check([_CANCELLED]):
                    _ABANDONED.append((self._group, work, bucket))
                    raise RunError(f"The broadcast of bucket {bucket.id} was cancelled: a receiver has died.")
            time.sleep(pause)
            pause = min(2 * pause, 2e-3)

    def close(self) -> None:
        with suppress(RuntimeError):  # the other side may be gone already
            self._group.shutdown()


# Groups with a broadcast that cannot end: their destructors would wait for it.
_ABANDONED: list[Any] = []


class CollectiveSender:
    """Rank 0 of its owner's group."""

    def __init__(self, group: _Broadcasts) -> None:
        self._group = group

    def send(self, bucket: Bucket, buffer: Tensor) -> None:
        self._group.broadcast(bucket, buffer[: bucket.bytes].to(self._group.address.device))

    def close(self) -> None:
        self._group.close()


class CollectiveReceiver:
    """Rank index + 1 of every owner's group; owns the memory buckets arrive in."""

    def __init__(self, address: CollectiveAddress, groups: list[_Broadcasts]) -> None:
        self._groups = groups
        self._buffer = torch.empty(address.slot_bytes, dtype=torch.uint8, device=address.device)

    def receive(self, bucket: Bucket) -> Tensor:
        data = self._buffer[: bucket.bytes]
        self._groups[bucket.owner].broadcast(bucket, data)
        return data

    def close(self) -> None:
        for group in self._groups:
            group.close()


def listening_store(host: str, deadline: float) -> dist.TCPStore:
    """A store on a free port of `host` alone; torch by itself would listen on every interface."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(_BACKLOG)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=deadline),
        master_listen_fd=listener.detach(),
    )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
