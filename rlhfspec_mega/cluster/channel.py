"""Whole messages over a socket: the driver's end never waits, a worker's end does."""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Generator, Iterator

_LENGTH = struct.Struct("!Q")  # bytes of the message that follows


class Channel:
    """One end of a connected socket. On a blocking socket, `send` and `receive` wait; otherwise they do what they can.

    A connection that has ended takes no more messages without a complaint: `receive` tells of it.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._outgoing: deque[memoryview] = deque()
        self._incoming = self._messages()

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    @property
    def sending(self) -> bool:
        """Whether something is left to `flush`."""
        return bool(self._outgoing)

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def send(self, message: bytes) -> None:
        """Queue a message and send what the socket takes of it."""
        self._outgoing += (memoryview(_LENGTH.pack(len(message))), memoryview(message))
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes of the queue."""
        try:
            while self._outgoing:
                sent = self._socket.sendmsg(self._outgoing)
                while self._outgoing and sent >= len(self._outgoing[0]):
                    sent -= len(self._outgoing.popleft())
                if self._outgoing:
                    self._outgoing[0] = self._outgoing[0][sent:]
        except BlockingIOError:
            pass
        except OSError:
            self._outgoing.clear()

    def receive(self) -> bytearray | None:
        """The next message, None while it has not come whole. Raises EOFError, once, when the connection has ended."""
        return next(self._incoming)

    def close(self) -> None:
        self._outgoing.clear()
        self._socket.close()

    def _messages(self) -> Iterator[bytearray | None]:
        while True:
            (length,) = _LENGTH.unpack((yield from self._exactly(_LENGTH.size)))
            yield (yield from self._exactly(length))

    def _exactly(self, size: int) -> Generator[None, None, bytearray]:
        """So many bytes; yields whenever the socket has no more for now."""
        buffer = bytearray(size)
        rest = memoryview(buffer)
        while rest:
            try:
                count = self._socket.recv_into(rest)
            except BlockingIOError:
                yield
                continue
            except OSError as error:
                raise EOFError from error
            if count == 0:
                raise EOFError
            rest = rest[count:]
        return buffer
