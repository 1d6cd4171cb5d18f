"""One small Ray actor per node that signals worker processes and reads their stacks, even if they do not respond."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlhfspec_mega.cluster.environment import worker_environment
from rlhfspec_mega.cluster.ray_worker import Identity

_WRITE_SECONDS = 1.5  # longest wait for a worker to write its stacks
_QUIET_SECONDS = 0.1  # stacks are complete after this long without new output


class Attendant:
    """Runs on the node of the worker processes it deals with."""

    def __init__(self) -> None:
        # Ctrl-C in a terminal reaches every process: workers are ended by the driver, with this actor's help.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def stacks(self, worker: Identity) -> str:
        """Python stacks of all threads of a process; a stopped process is continued.

        Empty if it is gone or does not react.
        """
        file = Path(f"/proc/{worker.pid}/fd/{worker.stacks}")
        try:
            if psutil.Process(worker.pid).create_time() != worker.created:
                return ""
            before = size = file.stat().st_size
            for number in (signal.SIGUSR1, signal.SIGCONT):
                os.kill(worker.pid, number)
            end = time.monotonic() + _WRITE_SECONDS
            while time.monotonic() < end:
                time.sleep(_QUIET_SECONDS)
                last, size = size, file.stat().st_size
                if size == last > before:
                    break
            return file.read_bytes()[before:].decode(errors="replace")
        except (OSError, psutil.Error):
            return ""

    def end(self, worker: Identity) -> None:
        """SIGKILL to the process and its children; to the children alone if the process is gone."""
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(worker.pid).create_time() != worker.created:
                return  # the number has been given to another process, which it is not while the group exists
        with suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)


class Attendants:
    """The attendant of every node, started on first use."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}

    def at(self, node: str) -> Any:
        """The attendant on the node with this id."""
        if node not in self._actors:
            self._actors[node] = (
                ray.remote(Attendant)
                .options(
                    num_cpus=0,
                    max_restarts=-1,
                    max_task_retries=1,
                    max_concurrency=64,  # stacks of all workers of a node at once
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                    runtime_env={"env_vars": worker_environment(threads=1)},
                )
                .remote()
            )
        return self._actors[node]

    def close(self) -> None:
        while self._actors:
            ray.kill(self._actors.popitem()[1], no_restart=True)
