"""cluster.launcher=local: workers are processes of this machine, started at once, no daemon, no port."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_readable
from pathlib import Path
from typing import Any

from rlhfspec_mega.cluster.interface import WorkerSpec, failure
from rlhfspec_mega.errors import RunError, UserError


def visible_devices(devices: Sequence[int], environment: Mapping[str, str]) -> str:
    """CUDA_VISIBLE_DEVICES of a worker: its indices count among the devices that this process was given (by Slurm)."""
    given = environment.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else None
    return ",".join(names[index] if names else str(index) for index in devices)


class LocalCall:
    """A call in flight; its worker fills in the answer."""

    def __init__(self, worker: _Process, method: str) -> None:
        self.role, self.rank, self.method = worker.role, worker.rank, method
        self.worker = worker
        self.answer: tuple[str, Any] | None = None

    @property
    def done(self) -> bool:
        return self.answer is not None

    def result(self) -> Any:
        if self.answer is None:
            raise RuntimeError(f"{self.method} on {self.role} rank {self.rank} has not answered yet")
        return self.answer[1]


class _Process:
    """One worker process and the driver's end of its socket."""

    def __init__(self, role: str, rank: int, spec: WorkerSpec, environment: dict[str, str], log: Path) -> None:
        self.role, self.rank, self.log = role, rank, log
        self.pending: LocalCall | None = None
        ours, theirs = socket.socketpair()
        with log.open("ab") as output, theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlhfspec_mega.cluster.child", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())
        self.send((spec.import_path, spec.arguments), "start")

    def send(self, message: tuple[Any, ...], method: str) -> LocalCall:
        if self.pending is not None:
            raise RunError(
                f"{self.role} rank {self.rank} is still busy with {self.pending.method}, asked for {method}."
            )
        self.pending = LocalCall(self, method)
        # A broken pipe is a dead worker: the wait that follows reports it with its phase.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
        return self.pending

    def receive(self) -> None:
        """Read one answer; a closed socket becomes the answer ("dead", exit status)."""
        try:
            answer = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            answer = ("dead", self.process.poll())
        if self.pending is not None:
            self.pending.answer = answer
            if answer[0] != "dead":
                self.pending = None

    def end(self) -> None:
        """Kill the process with its children (checkpoint writers) and reap it."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class LocalGroup:
    """The processes of one role."""

    def __init__(self, cluster: LocalCluster, role: str, workers: list[_Process]) -> None:
        self.role, self.size = role, len(workers)
        self._cluster, self._workers = cluster, workers

    def start(self, rank: int, method: str, *args: Any) -> LocalCall:
        return self._workers[rank].send((method, args), method)

    def call(self, method: str, *args: Any, phase: str, ranks: Sequence[int] | None = None) -> list[Any]:
        calls = [self.start(rank, method, *args) for rank in (range(self.size) if ranks is None else ranks)]
        self._cluster.wait(calls, phase)
        return [call.result() for call in calls]

    def scatter(self, method: str, arguments: Sequence[tuple[Any, ...]], phase: str) -> list[Any]:
        calls = [self.start(rank, method, *args) for rank, args in enumerate(arguments)]
        self._cluster.wait(calls, phase)
        return [call.result() for call in calls]


class LocalCluster:
    """Starts processes, waits for them with a deadline, and ends every one of them.

    Args:
        log_dir: one log file per worker.
        use_gpus: workers see the devices of their spec through CUDA_VISIBLE_DEVICES; otherwise none.
    """

    def __init__(
        self, log_dir: Path, *, threads: int, deadline_seconds: float, start_seconds: float, use_gpus: bool
    ) -> None:
        self._log_dir, self._threads, self._use_gpus = log_dir, threads, use_gpus
        self._deadline, self._start_seconds = deadline_seconds, start_seconds
        self._workers: list[_Process] = []
        log_dir.mkdir(parents=True, exist_ok=True)

    def _environment(self, devices: tuple[int, ...]) -> dict[str, str]:
        return os.environ | {
            "OMP_NUM_THREADS": str(self._threads),
            "MKL_NUM_THREADS": str(self._threads),
            "OMP_WAIT_POLICY": "passive",  # busy waits of idle workers would take the core from the others
            "TOKENIZERS_PARALLELISM": "false",
            "GLOO_SOCKET_IFNAME": "lo",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron's order of communication and computation relies on it
            "CUDA_VISIBLE_DEVICES": visible_devices(devices, os.environ) if self._use_gpus else "",
            "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
        }

    def launch(self, role: str, workers: Sequence[WorkerSpec]) -> LocalGroup:
        started = []
        for rank, spec in enumerate(workers):
            log = self._log_dir / f"{role}-{rank}.log"
            started.append(_Process(role, rank, spec, self._environment(spec.devices), log))
            self._workers.append(started[-1])
        return LocalGroup(self, role, started)

    def wait_started(self) -> None:
        calls = [worker.pending for worker in self._workers if worker.pending is not None]
        self.wait(calls, "start", seconds=self._start_seconds)

    def wait(self, calls: Sequence[Any], phase: str, *, first: bool = False, seconds: float | None = None) -> list[Any]:
        limit = self._deadline if seconds is None else seconds
        deadline = time.monotonic() + limit
        while True:
            finished = [call for call in calls if call.done]
            self._raise_failures(finished, calls, phase)
            waiting = [call for call in calls if not call.done]
            if not waiting or (first and finished):
                return finished
            self._receive(waiting, deadline - time.monotonic())
            if time.monotonic() >= deadline and not all(call.done for call in waiting):
                self._raise_deadline([call for call in waiting if not call.done], phase, limit)

    @staticmethod
    def _receive(waiting: Sequence[LocalCall], seconds: float) -> None:
        by_connection = {call.worker.connection: call.worker for call in waiting}
        for connection in wait_readable(list(by_connection), max(0.0, seconds)):
            by_connection[connection].receive()  # type: ignore[index]

    def _raise_failures(self, finished: Sequence[LocalCall], calls: Sequence[LocalCall], phase: str) -> None:
        """Raise the root cause: peers of a dead rank fail too, a moment earlier or later, with less telling errors."""
        if all(call.answer is not None and call.answer[0] == "ok" for call in finished):
            return
        grace = time.monotonic() + 2.0
        while (waiting := [call for call in calls if not call.done]) and time.monotonic() < grace:
            self._receive(waiting, grace - time.monotonic())
        for kind in ("dead", "user_error", "error"):
            for call in calls:
                if call.answer is not None and call.answer[0] == kind:
                    self._raise(call, kind, call.answer[1], phase)

    @staticmethod
    def _raise(call: LocalCall, kind: str, payload: Any, phase: str) -> None:
        if kind == "user_error":
            raise UserError(payload)
        what = (
            f"died with exit status {payload}" if kind == "dead" else f"failed with {payload.strip().splitlines()[-1]}"
        )
        raise failure(phase, call.role, call.rank, call.method, what, str(call.worker.log))

    def _raise_deadline(self, silent: Sequence[LocalCall], phase: str, limit: float) -> None:
        """Name the ranks that did not answer, after asking every worker for its stacks."""
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                worker.process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        who = ", ".join(f"{call.role} rank {call.rank} ({call.method})" for call in silent)
        raise RunError(
            f"In phase '{phase}', no answer within {limit:g} s from {who}; the Python stacks of all workers are in "
            f"{self._log_dir}. Raise cluster.deadline_seconds if the work is just slow."
        )

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers.clear()
