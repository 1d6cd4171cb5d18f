"""Messages between the driver and a local worker."""

from __future__ import annotations

import os
import socket

import pytest

from rlhfspec_mega.cluster.channel import Channel


@pytest.mark.parametrize("sizes", [(0, 1, 7, 70_000), (3_000_000, 0, 1)])
def test_messages_survive_every_way_of_being_cut(sizes: tuple[int, ...]) -> None:
    """Sent and received piece by piece on sockets that never wait, the small buffers cut them at many places."""
    left, right = socket.socketpair()
    for end in (left, right):
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 5000)
    sender, receiver = Channel(left), Channel(right)
    messages = [[os.urandom(size) for size in sizes[:parts]] for parts in range(len(sizes) + 1)]
    for message in messages:
        sender.send([memoryview(part) for part in message])
    came: list[list[bytearray]] = []
    while len(came) < len(messages):
        sender.flush()
        if (whole := receiver.receive()) is not None:
            came.append(whole)
    assert came == messages and not sender.sending and receiver.receive() is None
    sender.close()
    with pytest.raises(EOFError):
        receiver.receive()
    receiver.close()
