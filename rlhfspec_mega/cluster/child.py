"""What a local worker process does: build one object and execute calls on it until the driver disconnects."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys
from typing import NoReturn

from rlhfspec_mega.cluster.board import start_beating
from rlhfspec_mega.cluster.channel import Channel
from rlhfspec_mega.cluster.execute import Executor
from rlhfspec_mega.cluster.message import pack, unpack

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def die_with_parent(parent: int) -> None:
    """Ask Linux for SIGKILL when the parent dies, so that this process does not outlive it even in a collective."""
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


def run(name: str, descriptor: int, parent: int, board: int) -> NoReturn:
    """Be a worker until the driver disconnects, then end the process.

    Args:
        name: of the process, for `ps` and `top`.
        descriptor: file descriptor of the socket that is connected to the driver.
        board: file descriptor of the memory for heartbeats and stacks (see Board).
        parent: the process whose death ends this one.
    """
    die_with_parent(parent)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15])
    faulthandler.register(signal.SIGUSR1, file=board, all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # handles one that arrived earlier, too
    start_beating(board)
    serve(Channel(socket.socket(fileno=descriptor)))
    # Skip the interpreter's shutdown: threads of gloo or CUDA may wait for peers that are gone.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
