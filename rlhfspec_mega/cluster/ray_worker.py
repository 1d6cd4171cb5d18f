"""The class that runs as a Ray actor: calls through an Executor, and control calls that answer beside them."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray

from rlhfspec_mega.cluster.environment import HOST
from rlhfspec_mega.cluster.execute import Executor
from rlhfspec_mega.cluster.interface import Answer

CONTROL = "control"  # the concurrency group whose calls do not wait for the one that runs
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Identity:
    """Where to find a worker process from outside: `pid` is the leader of its process group on node `node`.

    `created` (seconds since the epoch) tells it from a later process with the same number; `stacks` is the descriptor
    it writes Python stacks to on SIGUSR1.
    """

    node: str
    pid: int
    created: float
    stacks: int


@dataclass(frozen=True)
class Stored:
    """An argument in Ray's object store, transferred to each node once.

    The reference is wrapped in a list, so that Ray passes it on without fetching the object.
    """

    reference: list[ray.ObjectRef]


class RayWorker:
    """Holds the worker object of one rank."""

    def __init__(self, log: str, directory: str) -> None:
        """Runs in the process's main thread, before the first call.

        Args:
            log: file that standard output and error go to.
            directory: the driver's working directory, which relative paths count from, where the node has it.
        """
        _write_to(Path(log))
        if Path(directory).is_dir():
            os.chdir(directory)
        # Ctrl-C and a batch system's SIGTERM may reach every process: the driver decides, and ends its workers.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stacks = os.memfd_create("rlhfspec_mega.stacks")
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)  # its children are ended with it
        # Ray's daemon of this node is the parent. A stopped process would not notice its end.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.environ[HOST] = ray.util.get_node_ip_address()
        if interface := _interface(ray.util.get_node_ip_address()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        self._executor = Executor()
        node = ray.get_runtime_context().get_node_id()
        self._identity = Identity(node, os.getpid(), psutil.Process().create_time(), stacks)

    @ray.method(concurrency_group=CONTROL)
    def ping(self) -> Identity:
        """A heartbeat."""
        return self._identity

    def execute(self, message: tuple[Any, ...]) -> Answer:
        """Build the worker, or call a method of it; always in the same thread."""
        first, rest = message
        if isinstance(rest, tuple):
            rest = tuple(ray.get(part.reference)[0] if isinstance(part, Stored) else part for part in rest)
        answer = self._executor.execute((first, rest))
        sys.stdout.flush()
        sys.stderr.flush()
        return answer


def _write_to(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)  # another node may not share the driver's files
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)


def _interface(address: str) -> str | None:
    """The network interface that has this address; gloo would take that of the host's name, often a loopback one."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.family in (socket.AF_INET, socket.AF_INET6) and entry.address == address for entry in addresses):
            return name
    return None
