"""TCP connections to engines: each engine listens on one socket, to which the driver and every engine that sends to it
have a connection."""

from __future__ import annotations

import contextlib
import hmac
import pickle
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

_FRAME = struct.Struct("<QQ")  # sizes in bytes of the pickled message and of the payload after it
_KEY_BYTES = 32
_NAME_BYTES = 64
_ACKNOWLEDGED = struct.Struct("<Q")
_SEND_SECONDS = 10.0  # receivers read in a thread of their own: one that reads nothing for this long is stuck


class Address(NamedTuple):
    """Where an engine listens.

    Attributes:
        key: secret that a sender must present.
        name: unique name of the engine process.
        machine: identifies the machine; processes with the same value can open each other's shared memory.
        rollout: number of the current rollout; the engine ignores samples that were sent in an earlier one.
    """

    host: str
    port: int
    key: bytes
    name: str
    machine: str
    rollout: int = 0


class Received(NamedTuple):
    """A message from `source`, an engine or the driver; None when the connection has ended and nothing more comes."""

    source: str
    message: Any
    payload: bytearray


def this_machine() -> str:
    """Identifies the processes whose /proc/<pid>/fd this one can open, by boot id and PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


class Inbox:
    """The receiving end. Threads accept and read connections, so that no sender waits for a decode step.

    Args:
        host: address at which the other engines reach this machine; the inbox listens on this address only.
    """

    def __init__(self, host: str) -> None:
        self._listener = socket.create_server((host, 0))
        port = self._listener.getsockname()[1]
        name = secrets.token_hex(16)
        self.address = Address(host, port, secrets.token_bytes(_KEY_BYTES), name, this_machine())
        self._received: queue.SimpleQueue[Received] = queue.SimpleQueue()
        self._accepted: set[socket.socket] = set()  # all open connections
        self._connections: dict[str, socket.socket] = {}  # those whose sender has identified itself, by its name
        self._refused: set[str] = set()  # names of dead engines
        self._closed = False
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True, name="migration-inbox").start()

    @property
    def empty(self) -> bool:
        """Whether no message has come since the last `take`."""
        return self._received.empty()

    def take(self, seconds: float = 0.0) -> list[Received]:
        """Messages received so far, in order; waits up to `seconds` for the first."""
        found: list[Received] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._received.get(seconds > 0, seconds))
            while True:
                found.append(self._received.get_nowait())
        return [received for received in found if received.source not in self._refused or received.message is None]

    def acknowledge(self, source: str, transfer: int) -> bool:
        """Tell a source that this engine has taken its sample; returns whether the source was still connected."""
        connection = self._connections.get(source)
        if connection is None:
            return False
        try:
            connection.sendall(_ACKNOWLEDGED.pack(transfer))
        except OSError:
            return False
        return True

    def drain(self, source: str, seconds: float) -> list[Received]:
        """The last messages of a dead engine; later ones are ignored.

        Waits up to `seconds` for the end of its connection, which the kernel delivers after its last message.
        """
        found, end = [], time.monotonic() + seconds
        while source in self._connections and time.monotonic() < end:
            found += self.take(0.01)
        found += self.take()
        self._refused.add(source)
        return found

    def close(self) -> None:
        """Stop listening and end all connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self._listener.close()
        with self._lock:
            self._closed = True  # the accepting thread closes a connection that it is just accepting
            accepted, self._accepted = self._accepted, set()
        for connection in accepted:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._accepted.add(connection)
            threading.Thread(target=self._read, args=(connection,), daemon=True, name="migration-reader").start()

    def _read(self, connection: socket.socket) -> None:
        source = ""
        with contextlib.suppress(OSError, EOFError), connection:
            _keep_alive(connection)
            connection.settimeout(_SEND_SECONDS)
            hello = _exactly(connection, _KEY_BYTES + _NAME_BYTES)
            if not hmac.compare_digest(hello[:_KEY_BYTES], self.address.key):
                return
            source = hello[_KEY_BYTES:].rstrip(b"\0").decode("ascii")
            connection.settimeout(None)
            with self._lock:
                self._connections[source] = connection
            while True:
                sizes = _FRAME.unpack(_exactly(connection, _FRAME.size))
                message, payload = (_exactly(connection, size) for size in sizes)
                self._received.put(Received(source, pickle.loads(message), payload))
        with self._lock:
            self._accepted.discard(connection)
            last = self._connections.get(source) is connection  # false if the source has reconnected
            if last:
                del self._connections[source]
        if last:
            self._received.put(Received(source, None, bytearray()))


class Outbox:
    """The sending end of a connection to another engine.

    All methods raise OSError if the engine is gone or has read nothing for _SEND_SECONDS.

    Args:
        seconds: longest wait for the connection.
    """

    def __init__(self, address: Address, own_name: str, seconds: float = _SEND_SECONDS) -> None:
        self._socket = socket.create_connection((address.host, address.port), timeout=seconds)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_alive(self._socket)
        self._socket.sendall(address.key + own_name.encode("ascii").ljust(_NAME_BYTES, b"\0"))
        self._answers = bytearray()

    def send(self, message: Any, payload: memoryview | bytes = b"") -> None:
        """Send one frame. An error may leave a partial frame, after which the connection cannot be used any more."""
        pickled = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._socket.settimeout(_SEND_SECONDS)
        self._socket.sendall(_FRAME.pack(len(pickled), len(payload)) + pickled)
        if len(payload):
            self._socket.sendall(payload)

    def acknowledged(self) -> Sequence[int]:
        """Numbers of the transfers that the other engine has acknowledged since the last call."""
        self._socket.setblocking(False)
        while True:
            try:
                part = self._socket.recv(4096)
            except BlockingIOError:
                break
            except OSError:
                part = b""
            if not part:
                if len(self._answers) >= _ACKNOWLEDGED.size:
                    break  # return these first; the next call finds the connection closed again
                raise ConnectionError("the other engine has closed its end")
            self._answers += part
        whole = len(self._answers) // _ACKNOWLEDGED.size * _ACKNOWLEDGED.size
        found = [number for (number,) in _ACKNOWLEDGED.iter_unpack(bytes(self._answers[:whole]))]
        del self._answers[:whole]
        return found

    def close(self) -> None:
        self._socket.close()


def _keep_alive(connection: socket.socket) -> None:
    """Detect within about 20 s that the other machine has died, since a dead machine does not close its connections."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 20_000)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _exactly(connection: socket.socket, size: int) -> bytearray:
    """Read exactly `size` bytes. Raises EOFError if the connection ends before."""
    found = bytearray(size)
    view = memoryview(found)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return found
