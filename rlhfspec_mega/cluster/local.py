"""launcher=local: workers are processes on this machine; neither a daemon nor a port is needed."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhfspec_mega.cluster.board import Board
from rlhfspec_mega.cluster.channel import Channel
from rlhfspec_mega.cluster.environment import worker_environment
from rlhfspec_mega.cluster.fork_server import ForkServer, fork_server
from rlhfspec_mega.cluster.interface import WorkerSpec
from rlhfspec_mega.cluster.message import pack, unpack
from rlhfspec_mega.cluster.process import WorkerProcess
from rlhfspec_mega.cluster.supervised import SupervisedCluster

logger = logging.getLogger(__name__)

_EXIT_SECONDS = 5.0  # between the end of a worker's connection and its exit
_KILL_SECONDS = 5.0  # between SIGKILL and the end of a process, unless it hangs in the kernel


def visible_devices(devices: Sequence[int], environment: Mapping[str, str]) -> str:
    """CUDA_VISIBLE_DEVICES of a worker: its indices refer to the devices given to this process (e.g. by Slurm)."""
    given = environment.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else None
    return ",".join(names[index] if names else str(index) for index in devices)


class _LocalProcess(WorkerProcess):
    """One worker process and the driver's end of its socket."""

    def __init__(
        self,
        role: str,
        rank: int,
        spec: WorkerSpec,
        log: Path,
        server: ForkServer,
        environment: Mapping[str, str],
        module: str | None,
    ) -> None:
        super().__init__(role, rank, spec, log)
        self._board = Board()
        ours, theirs = socket.socketpair()
        with log.open("ab") as output, theirs:
            self._process = server.start(
                f"{role}-{rank}",
                module,
                os.environ | environment,
                theirs.fileno(),
                self._board.descriptor,
                output.fileno(),
            )
        ours.setblocking(False)
        self.channel = Channel(ours)
        self._killed: float | None = None  # when SIGKILL was sent

    def post(self, message: tuple[Any, ...]) -> None:
        self.channel.send(pack(message))

    def read(self) -> bool:
        """Read what has arrived; returns whether an answer was complete.

        A closed connection means that the worker ended.
        """
        try:
            message = self.channel.receive()
        except EOFError:
            self.channel.close()
            self._process.wait(_EXIT_SECONDS)
            self.answered(("dead", self.exit_reason()))
            return True
        if message is None:
            return False
        self.answered(unpack(message))
        return True

    def last_beat(self) -> float:
        return self._board.last_beat()

    def exit_reason(self) -> str | None:
        status = self._process.poll()
        if status is not None:
            return f"exit status {status}"
        return "a closed connection" if self.channel.closed else None

    def ask_stacks(self) -> None:
        if self._killed is not None:
            return
        self._board.expect_stacks()
        for number in (signal.SIGUSR1, signal.SIGCONT):
            self._process.signal(number)

    def stacks(self) -> str:
        return self._board.stacks()

    def strike(self) -> None:
        """Kill the process and its children (checkpoint writers), without waiting; safe to call twice."""
        if self._killed is not None:
            return
        self._killed = time.monotonic()
        self.channel.close()
        self._board.close()
        self._process.signal(signal.SIGKILL, group=True)

    def kill(self) -> None:
        self.strike()
        assert self._killed is not None
        if self._process.wait(max(0.0, self._killed + _KILL_SECONDS - time.monotonic())) is None:
            logger.warning(
                "%s rank %d (process %d) was killed but has not ended after %g s: it is stuck in the kernel, "
                "and keeps its devices.",
                self.role,
                self.rank,
                self._process.pid(),
                _KILL_SECONDS,
            )


def import_ahead(modules: Sequence[str], threads: int) -> None:
    """Let the code of workers without a GPU be imported beside what the driver does before it starts them."""
    environment = _environment(threads, "")
    fork_server(threads, environment).import_ahead(modules, os.environ | environment)


def _environment(threads: int, devices: str) -> dict[str, str]:
    return worker_environment(threads) | {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": devices}


class LocalCluster(SupervisedCluster):
    """Starts worker processes on this machine and ends every one of them.

    Args:
        threads: threads of a worker's computation.
        use_gpus: workers see the devices of their spec through CUDA_VISIBLE_DEVICES; otherwise none.
        supervision: log_dir, deadlines and limits; see SupervisedCluster.
    """

    def __init__(self, log_dir: Path, *, threads: int, use_gpus: bool, **supervision: Any) -> None:
        super().__init__(log_dir, **supervision)
        self._threads, self._use_gpus = threads, use_gpus

    def spawn(self, role: str, rank: int, spec: WorkerSpec, log: Path) -> WorkerProcess:
        devices = visible_devices(spec.devices, os.environ) if self._use_gpus else ""
        environment = _environment(self._threads, devices)
        # A library that is imported may look for a GPU, and no process can use one that was forked after that.
        module = None if self._use_gpus else spec.import_path.rpartition(".")[0]
        server = fork_server(self._threads, environment)
        return _LocalProcess(role, rank, spec, log, server, environment, module)

    def receive(self, processes: Sequence[WorkerProcess], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._exchange(processes, end - time.monotonic()) and time.monotonic() < end:
            pass

    def end(self, role: str) -> None:
        self._strike(process for process in self._processes.values() if process.role == role)
        super().end(role)

    def close(self) -> None:
        self._strike(self._processes.values())
        super().close()

    def _exchange(self, processes: Sequence[WorkerProcess], seconds: float) -> bool:
        """Wait for the first event and send and receive what is possible; returns whether an answer was complete."""
        answered = False
        with selectors.PollSelector() as selector:
            for process in dict.fromkeys([*processes, *self._processes.values()]):
                assert isinstance(process, _LocalProcess)
                events = selectors.EVENT_READ if process in processes else 0
                events |= selectors.EVENT_WRITE if process.channel.sending else 0
                if events and not process.channel.closed:
                    selector.register(process.channel, events, process)
            for key, events in selector.select(max(0.0, seconds)):
                if events & selectors.EVENT_WRITE:
                    key.data.channel.flush()
                if events & selectors.EVENT_READ:
                    answered |= key.data.read()
        return answered

    @staticmethod
    def _strike(processes: Iterable[WorkerProcess]) -> None:
        """Kill all of them first, and only then wait, so that the waits overlap."""
        for process in processes:
            assert isinstance(process, _LocalProcess)
            process.strike()
