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
_BACKLOG = 1024  # pending connections of the listening socket


class CollectiveHost:
    """Owns the TCP store at which the process groups of a collective transport meet; it listens on `host` alone."""

    def __init__(
        self, host: str, owners: int, receivers: int, slot_bytes: int, deadline: float, device: str = "cpu"
    ) -> None:
        """Listen on a free port of `host`, an address of this machine that all workers can reach."""
        self._store: dist.TCPStore | None = listening_store(host, deadline)
        self.address = CollectiveAddress(host, self._store.port, owners, receivers, slot_bytes, deadline, device)

    def drop(self, receiver: int) -> None:
        """Cancel the collective for all members: it cannot continue without this one."""
        if self._store is not None:
            self._store.set(_CANCELLED, f"engine {receiver} has died or failed")

    def close(self) -> None:
        """Close the store: members that wait, now or later, raise RunError. Safe to call twice."""
        self._store = None


@dataclass(frozen=True)
class CollectiveAddress:
    """Where members meet. `owners`: number of pipeline stages; `deadline` in seconds; `device`: cpu (gloo) or cuda.

    Each owner has a process group with all receivers, so that a bucket goes only where it is needed. The members'
    default process groups are not used.
    """

    host: str
    port: int
    owners: int
    receivers: int
    slot_bytes: int
    deadline: float
    device: str = "cpu"

    def sender(self, owner: int) -> CollectiveSender:
        """Create a sender; blocks until all receivers exist. Senders and receivers must be created at the same time."""
        return CollectiveSender(_Broadcasts(self, owner, 0))

    def receiver(self, index: int) -> CollectiveReceiver:
        """Create a receiver; blocks until all senders and receivers exist."""
        return CollectiveReceiver(self, [_Broadcasts(self, owner, index + 1) for owner in range(self.owners)])


class _Broadcasts:
    """One member of an owner's process group: the sender is rank 0, receiver i is rank i + 1.

    Members of a collective do not learn by themselves that another one has died. So a waiting member asks the host's
    store from time to time whether the collective was cancelled. The NCCL path, above all its abort, has not been run.
    """

    def __init__(self, address: CollectiveAddress, owner: int, rank: int) -> None:
        self.address = address
        what = f"The resharding group of pipeline stage {owner} did not form"
        self._store = _connect(address, what)
        try:
            self._await_members(owner, what)
            self._group = self._join(owner, rank)
        except RuntimeError as error:
            self._check(what)
            raise RunError(f"{what} at {address.host}:{address.port} ({_first_line(error)}).") from None

    def _await_members(self, owner: int, what: str) -> None:
        """Wait until all members have arrived.

        The constructor of a process group, which waits too, cannot be cancelled.
        """
        arrivals, members = f"resharding/{owner}/arrivals", self.address.receivers + 1
        end, pause = time.monotonic() + self.address.deadline, 1e-3
        arrived = self._store.add(arrivals, 1)
        while True:
            self._check(what)
            if arrived >= members:
                return
            if time.monotonic() > end:
                raise RunError(
                    f"{what} within {self.address.deadline:g} s, {arrived} of {members} members came: "
                    "look for a dead or stuck worker."
                )
            time.sleep(pause)
            pause = min(2 * pause, _CHECK_SECONDS)
            arrived = self._store.add(arrivals, 0)

    def _join(self, owner: int, rank: int) -> Any:
        prefixed, size = dist.PrefixStore(f"resharding/{owner}", self._store), self.address.receivers + 1
        timeout = timedelta(seconds=self.address.deadline)
        if self.address.device == "cpu":
            return dist.ProcessGroupGloo(prefixed, rank, size, timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = 2 * timeout  # our deadline comes first: after NCCL's, torch ends the process
        return dist.ProcessGroupNCCL(prefixed, rank, size, options)

    def broadcast(self, bucket: Bucket, data: Tensor) -> None:
        """Take part in the broadcast of `data`. Raises RunError if it fails, takes too long, or was cancelled."""
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
        """Poll instead of blocking, to notice a cancelled broadcast."""
        end, pause = time.monotonic() + self.address.deadline, 5e-5
        next_check = time.monotonic() + _CHECK_SECONDS
        while not work.is_completed():
            if time.monotonic() > next_check:
                next_check = time.monotonic() + _CHECK_SECONDS
                try:
                    self._check(f"The broadcast of bucket {bucket.id} was cancelled")
                    if time.monotonic() > end:
                        raise RuntimeError("it did not end")
                except (RunError, RuntimeError):
                    self._abandon(work)
                    raise
            time.sleep(pause)
            pause = min(2 * pause, 2e-3)

    def _check(self, what: str) -> None:
        """Raise RunError with `what` if a receiver was dropped or the host is closed."""
        try:
            reason = self._store.get(_CANCELLED).decode() if self._store.check([_CANCELLED]) else ""
        except RuntimeError:  # the host, and with it the store, is gone
            reason = "the transport was closed, as when another worker has died"
        if reason:
            raise RunError(f"{what}: {reason}.")

    def _abandon(self, work: Any) -> None:
        """Leave a broadcast that will not complete."""
        if self.address.device == "cpu":
            _ABANDONED.append((self._group, work))
        else:
            self._group.abort()  # ends the GPU kernel before NCCL's timeout does

    def close(self) -> None:
        with suppress(RuntimeError):  # the other side may already be gone
            self._group.shutdown()


# Groups of gloo with a broadcast that cannot end: their destructors would wait for it.
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
    """Rank index + 1 of every owner's group; owns the memory that buckets arrive in."""

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


def _connect(address: CollectiveAddress, what: str) -> dist.TCPStore:
    """Connect to the host's store. Raises RunError with `what` at once if the host no longer listens."""
    timeout = timedelta(seconds=address.deadline)
    try:
        # Listening began before there was an address. Torch by itself would try a closed port until the deadline.
        socket.create_connection((address.host, address.port), address.deadline).close()
        return dist.TCPStore(address.host, address.port, is_master=False, timeout=timeout)
    except (OSError, RuntimeError) as error:
        raise RunError(
            f"{what}: the transport at {address.host}:{address.port} was closed or cannot be reached "
            f"({_first_line(error)})."
        ) from None


def listening_store(host: str, deadline: float) -> dist.TCPStore:
    """A store on a free port of `host` alone; torch's default would listen on every interface."""
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
