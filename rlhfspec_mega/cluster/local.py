"""cluster.launcher=local: workers are processes of this machine, started at once, no daemon, no port."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_readable
from pathlib import Path
from typing import Any

from rlhfspec_mega.cluster.board import Board
from rlhfspec_mega.cluster.environment import worker_environment
from rlhfspec_mega.cluster.interface import WorkerSpec
from rlhfspec_mega.cluster.process import WorkerProcess
from rlhfspec_mega.cluster.supervised import SupervisedCluster


def visible_devices(devices: Sequence[int], environment: Mapping[str, str]) -> str:
    """CUDA_VISIBLE_DEVICES of a worker: its indices count among the devices that this process was given (by Slurm)."""
    given = environment.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else None
    return ",".join(names[index] if names else str(index) for index in devices)


class _LocalProcess(WorkerProcess):
    """One worker process and the driver's end of its socket."""

    def __init__(self, role: str, rank: int, spec: WorkerSpec, log: Path, environment: Mapping[str, str]) -> None:
        super().__init__(role, rank, spec, log)
        self._board = Board()
        ours, theirs = socket.socketpair()
        passed = [theirs.fileno(), self._board.descriptor]
        with log.open("ab") as output, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rlhfspec_mega.cluster.child", str(passed[0]), str(os.getpid()), str(passed[1])],
                pass_fds=passed,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())

    def post(self, message: tuple[Any, ...]) -> None:
        # A closed or broken socket is a dead worker: whoever waits for the answer finds its exit status.
        with contextlib.suppress(OSError):
            self.connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    def read(self) -> None:
        """File one answer; a closed socket means that the process ends."""
        try:
            self.answered(pickle.loads(self.connection.recv_bytes()))
        except (EOFError, ConnectionResetError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            self.answered(("dead", self.exit_reason() or "a closed connection"))

    def last_beat(self) -> float:
        return self._board.last_beat()

    def exit_reason(self) -> str | None:
        status = self._process.poll()
        return None if status is None else f"exit status {status}"

    def ask_stacks(self) -> None:
        self._board.expect_stacks()
        for number in (signal.SIGUSR1, signal.SIGCONT):
            self._process.send_signal(number)  # Popen sends none to a process it has reaped

    def stacks(self) -> str:
        return self._board.stacks()

    def kill(self) -> None:
        """With its children (checkpoint writers), and reap it."""
        if self.connection.closed:
            return
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._board.close()


class LocalCluster(SupervisedCluster):
    """Starts processes and ends every one of them.

    Args:
        threads: of a worker's computation.
        use_gpus: workers see the devices of their spec through CUDA_VISIBLE_DEVICES; otherwise none.
        supervision: log_dir, deadlines and limits; see SupervisedCluster.
    """

    def __init__(self, log_dir: Path, *, threads: int, use_gpus: bool, **supervision: Any) -> None:
        super().__init__(log_dir, **supervision)
        self._threads, self._use_gpus = threads, use_gpus

    def spawn(self, role: str, rank: int, spec: WorkerSpec, log: Path) -> WorkerProcess:
        devices = visible_devices(spec.devices, os.environ) if self._use_gpus else ""
        environment = worker_environment(self._threads) | {
            "GLOO_SOCKET_IFNAME": "lo",
            "CUDA_VISIBLE_DEVICES": devices,
        }
        return _LocalProcess(role, rank, spec, log, os.environ | environment)

    def receive(self, processes: Sequence[WorkerProcess], seconds: float) -> None:
        by_connection = {p.connection: p for p in processes if isinstance(p, _LocalProcess) and not p.connection.closed}
        for connection in wait_readable(list(by_connection), max(0.0, seconds)):
            by_connection[connection].read()  # type: ignore[index]
