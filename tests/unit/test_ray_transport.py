"""The object-store transport's mailbox as a plain object; whole transfers between nodes are in tests/ray."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Coroutine
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfspec_mega.cluster.ray_mailbox import IN_FLIGHT, Mailbox
from rlhfspec_mega.cluster.ray_transport import _Writable


async def take_all(mailbox: Mailbox, index: int, count: int, pauses: list[int]) -> list[int]:
    got = []
    for number in range(count):
        taken = await mailbox.take(index, number)
        assert taken is not None
        got.append(taken[0])
        for _ in range(pauses[number % len(pauses)]):
            await asyncio.sleep(0)
    await mailbox.release(index, count)
    return got


@settings(max_examples=50, deadline=None)
@given(
    buckets=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    pauses=st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_every_receiver_gets_every_bucket_in_order_and_two_are_kept(
    buckets: list[int], pauses: list[list[int]]
) -> None:
    most = 0

    async def send(mailbox: Mailbox) -> None:
        nonlocal most
        for bucket in buckets:
            assert await mailbox.reserve() == []
            await mailbox.post(bucket, ["reference"])
            most = max(most, len(mailbox._buckets))

    async def all_ends() -> None:
        mailbox = Mailbox(len(pauses), 30.0)
        ends: list[Coroutine[Any, Any, Any]] = [
            take_all(mailbox, index, len(buckets), pause) for index, pause in enumerate(pauses)
        ]
        _, *received = await asyncio.gather(send(mailbox), *ends)
        assert received == [buckets] * len(pauses)
        assert not mailbox._buckets, "what all have released is freed"

    asyncio.run(all_ends())
    assert 1 <= most <= IN_FLIGHT


def test_waits_end_at_the_deadline_and_a_dropped_receiver_holds_nobody_up() -> None:
    async def scenario() -> None:
        mailbox = Mailbox(2, 0.05)
        assert await mailbox.take(0, 0) is None
        for bucket in range(IN_FLIGHT):
            assert await mailbox.reserve() == []
            await mailbox.post(bucket, [bucket])
        assert await mailbox.reserve() == [0, 1]
        await mailbox.release(0, 1)
        assert await mailbox.reserve() == [1]
        await mailbox.drop(1)
        assert await mailbox.reserve() == []
        assert await mailbox.take(0, 1) == (1, [1])

    asyncio.run(scenario())


def test_read_only_bytes_become_a_tensor_without_a_copy_or_a_warning() -> None:
    data = np.arange(64, dtype=np.uint8)
    data.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = torch.from_numpy(np.asarray(_Writable(data)))
    assert tensor.data_ptr() == data.ctypes.data
    expected = list(range(64))
    del data  # the tensor keeps the bytes
    assert tensor.tolist() == expected
