"""Whole messages over a socket: the driver's end never blocks, a worker's end does."""

from __future__ import annotations

import itertools
import socket
import struct
from collections import deque
from collections.abc import Generator, Iterator, Sequence

_LENGTH = struct.Struct("!Q")  # parts of the message that follows, then bytes of each

_MOST_PARTS = 512  # per system call; the kernel's limit is 1024


class Channel:
    """One end of a connected socket.

    On a blocking socket `send` and `receive` wait; otherwise they do what is possible at once. `send` does not report a
    closed connection; `receive` does.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._outgoing: deque[memoryview] = deque()
        self._incoming = self._messages()

    def fileno(self) -> int:
        """File descriptor, for selectors."""
        return self._socket.fileno()

    @property
    def sending(self) -> bool:
        """Whether `flush` has something left to send."""
        return bool(self._outgoing)

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def send(self, parts: Sequence[memoryview]) -> None:
        """Queue a message and send as much as the socket takes; the parts must not change until all of it is sent."""
        lengths = b"".join(_LENGTH.pack(part.nbytes) for part in parts)
        self._outgoing.append(memoryview(_LENGTH.pack(len(parts)) + lengths))
        self._outgoing += (part for part in parts if part.nbytes)
        self.flush()

    def flush(self) -> None:
        """Send as much of the queue as the socket takes."""
        try:
            while self._outgoing:
                sent = self._socket.sendmsg(itertools.islice(self._outgoing, _MOST_PARTS))
                while self._outgoing and sent >= len(self._outgoing[0]):
                    sent -= len(self._outgoing.popleft())
                if self._outgoing:
                    self._outgoing[0] = self._outgoing[0][sent:]
        except BlockingIOError:
            pass
        except OSError:
            self._outgoing.clear()

    def receive(self) -> list[bytearray] | None:
        """The next message; None if it has not arrived completely.

        Raises EOFError, once, when the connection is closed.
        """
        return next(self._incoming)

    def close(self) -> None:
        self._outgoing.clear()
        self._socket.close()

    def _messages(self) -> Iterator[list[bytearray] | None]:
        while True:
            (count,) = _LENGTH.unpack((yield from self._exactly(_LENGTH.size)))
            lengths = yield from self._exactly(count * _LENGTH.size)
            parts = []
            for (length,) in _LENGTH.iter_unpack(lengths):
                parts.append((yield from self._exactly(length)))
            yield parts

    def _exactly(self, size: int) -> Generator[None, None, bytearray]:
        """Read exactly so many bytes; yields whenever the socket has no more for now."""
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
