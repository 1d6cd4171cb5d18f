"""Main module of a local worker process: builds one object and executes calls on it until the driver disconnects."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys

from rlhfspec_mega.cluster.board import start_beating
from rlhfspec_mega.cluster.channel import Channel
from rlhfspec_mega.cluster.execute import Executor
from rlhfspec_mega.cluster.message import pack, unpack

_PR_SET_PDEATHSIG = 1


def _die_with_parent(parent: int) -> None:
    """Ask Linux for SIGKILL when the driver dies, so that no worker outlives it even inside a collective."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def serve(channel: Channel) -> None:
    """Answer the driver's messages one by one until it closes the connection."""
    executor = Executor()
    while True:
        try:
            message = channel.receive()
        except EOFError:
            return
        assert message is not None  # the socket blocks
        channel.send(pack(executor.execute(unpack(message))))


def main() -> None:
    descriptor, parent, board = (int(argument) for argument in sys.argv[1:])
    _die_with_parent(parent)
    # Ctrl-C and a batch system's SIGTERM may reach every process: the driver decides, and ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, file=board, all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # handles one that arrived earlier, too
    start_beating(board)
    serve(Channel(socket.socket(fileno=descriptor)))
    # Skip the interpreter's shutdown: threads of gloo or CUDA may wait for peers that are gone.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
