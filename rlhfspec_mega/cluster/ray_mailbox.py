"""The Ray actor through which senders pass references of buckets to receivers, at most two unreleased at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

IN_FLIGHT = 2  # the next bucket is stored while engines load the last one
_FOREVER = 2**62  # more buckets than any run sends


class Mailbox:
    """Counts buckets over all updates and keeps references that some receiver has not released.

    A wait that exceeds `deadline` seconds returns what is missing; the callers turn this into errors.
    """

    def __init__(self, receivers: int, deadline: float) -> None:
        self._deadline = deadline
        self._released = [0] * receivers
        self._posted = 0
        self._buckets: dict[int, tuple[int, list[Any]]] = {}  # number -> (bucket id, [reference])
        self._changed = asyncio.Condition()

    async def reserve(self) -> list[int]:
        """Wait until another bucket may be posted; returns the receivers that block it at the deadline."""
        oldest = self._posted - IN_FLIGHT
        await self._wait(lambda: min(self._released) > oldest)
        return [index for index, count in enumerate(self._released) if count <= oldest]

    async def post(self, bucket: int, reference: list[Any]) -> None:
        """Offer a bucket. The reference comes in a list, so that Ray passes it on without fetching the object."""
        async with self._changed:
            self._buckets[self._posted] = (bucket, reference)
            self._posted += 1
            self._tidy()

    async def take(self, receiver: int, number: int) -> tuple[int, list[Any]] | None:
        """Release all buckets before `number` and wait for that one.

        Returns its id and reference, or None at the deadline.
        """
        await self.release(receiver, number)
        await self._wait(lambda: self._posted > number)
        return self._buckets.get(number)

    async def release(self, receiver: int, count: int) -> None:
        """The receiver has loaded the first `count` buckets."""
        async with self._changed:
            self._released[receiver] = max(self._released[receiver], count)
            self._tidy()

    async def drop(self, receiver: int) -> None:
        """Do not wait for this receiver from now on."""
        await self.release(receiver, _FOREVER)

    def _tidy(self) -> None:
        """Forget buckets that all receivers have released, so that Ray frees them, and wake the waiting callers."""
        done = min(self._released)
        for number in [number for number in self._buckets if number < done]:
            del self._buckets[number]
        self._changed.notify_all()

    async def _wait(self, ready: Callable[[], bool]) -> None:
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(ready), self._deadline)
            except TimeoutError:
                return
