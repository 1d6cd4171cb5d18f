"""Transport of buckets through Ray's object store: put once by the stage, fetched once by every node with engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor

from rlhfspec_mega.cluster.environment import worker_environment
from rlhfspec_mega.cluster.ray_mailbox import Mailbox
from rlhfspec_mega.errors import RunError
from rlhfspec_mega.resharding.buckets import Bucket

_ANSWER_SECONDS = 5.0  # over the deadline, for the mailbox's answer that a wait was in vain
_MAX_WAITS = 100_000  # calls that wait in the mailbox at the same time


class ObjectStoreHost:
    """Owns the mailbox, an actor on the driver's node that takes no CPU; `address` is what workers make ends from."""

    def __init__(self, receivers: int, deadline: float) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        mailbox = (
            ray.remote(Mailbox)
            .options(
                num_cpus=0,
                max_concurrency=_MAX_WAITS,
                scheduling_strategy=here,
                runtime_env={"env_vars": worker_environment(threads=1)},
            )
            .remote(receivers, deadline)
        )
        self.address = ObjectStoreAddress(mailbox, deadline)

    def drop(self, receiver: int) -> None:
        """Count every bucket, also those to come, as released by this receiver."""
        if ray.is_initialized():  # a call would start Ray anew
            self.address.mailbox.drop.remote(receiver)

    def close(self) -> None:
        """End the mailbox; whoever still waits at it raises RunError. Safe to call twice."""
        if ray.is_initialized():
            ray.kill(self.address.mailbox)


@dataclass(frozen=True)
class ObjectStoreAddress:
    """Handle of the mailbox. `deadline` in seconds."""

    mailbox: Any
    deadline: float

    def sender(self, owner: int) -> ObjectStoreSender:
        """The sender of the stage `owner`; all stages post to the same mailbox in turn."""
        return ObjectStoreSender(self)

    def receiver(self, index: int) -> ObjectStoreReceiver:
        return ObjectStoreReceiver(self, index)

    def ask(self, answer: ray.ObjectRef, what: str) -> Any:
        """An answer of the mailbox, or an object. Raises RunError with `what` when it does not come."""
        try:
            return ray.get(answer, timeout=self.deadline + _ANSWER_SECONDS)
        except GetTimeoutError:
            raise RunError(f"{what} within {self.deadline:g} s: look for a dead or stuck worker or node.") from None
        except RayError as error:
            raise RunError(f"{what}: its sender or the transport's mailbox has ended ({_reason(error)}).") from None


class ObjectStoreSender:
    """Puts buckets into its node's object store, at most two that some receiver has not released."""

    def __init__(self, address: ObjectStoreAddress) -> None:
        self._address = address

    def send(self, bucket: Bucket, buffer: Tensor) -> None:
        address = self._address
        what = f"Bucket {bucket.id} was not posted"
        if late := address.ask(address.mailbox.reserve.remote(), what):
            raise RunError(
                f"Bucket {bucket.id} found no room, engines {late} did not take the last but one within "
                f"{address.deadline:g} s: look for a dead or stuck worker."
            )
        try:
            reference = ray.put(buffer[: bucket.bytes].cpu().numpy())
        except RayError as error:  # the store or its disk is full, or Ray has ended
            raise RunError(f"{what}: the object store did not take it ({_reason(error)}).") from None
        address.ask(address.mailbox.post.remote(bucket.id, [reference]), what)  # from here on the mailbox holds it

    def close(self) -> None:
        """Nothing to do: the mailbox drops what was sent when all have it."""


class ObjectStoreReceiver:
    """Gives views of the buckets in its node's object store. Create it before the first bucket is sent."""

    def __init__(self, address: ObjectStoreAddress, index: int) -> None:
        self._address = address
        self._index = index
        self._received = 0

    def receive(self, bucket: Bucket) -> Tensor:
        address, what = self._address, f"Engine {self._index} did not get bucket {bucket.id}"
        taken = address.ask(address.mailbox.take.remote(self._index, self._received), what)
        if taken is None:
            raise RunError(f"{what} within {address.deadline:g} s: look for a dead or stuck worker.")
        posted, [reference] = taken
        if posted != bucket.id:
            raise RunError(
                f"Engine {self._index} got bucket {posted} instead of {bucket.id}: "
                "sender and engines follow different plans."
            )
        data = address.ask(reference, what)
        self._received += 1
        return torch.from_numpy(np.asarray(_Writable(data)))

    def close(self) -> None:
        """Release the last bucket, so that a sender no longer waits for this receiver to load it."""
        self._address.mailbox.release.remote(self._index, self._received)


class _Writable:
    """The same bytes without the mark that they are read-only, of which torch would warn; nobody writes to them."""

    def __init__(self, data: np.ndarray) -> None:
        self._data = data  # keeps the object in the store for as long as a view of it lives
        self.__array_interface__ = data.__array_interface__ | {"data": (data.ctypes.data, False)}


def _reason(error: RayError) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
