"""A local cluster with the limits that tests want, and its processes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from rlhfspec_mega.cluster.local import LocalCluster

LIMITS = {"call_timeout": 60.0, "start_timeout": 120.0, "heartbeat_timeout": 60.0, "max_restarts": 3}


def local_cluster(directory: Path, *, use_gpus: bool = False, **limits: Any) -> LocalCluster:
    """Logs go to `directory`/logs; the caller closes it."""
    return LocalCluster(directory / "logs", threads=1, use_gpus=use_gpus, **(LIMITS | limits))


def worker_process(name: str, driver: int | None = None) -> psutil.Process | None:
    """The newest process of a worker, such as "actor-0", of this driver, or of the current process."""
    found = []
    for server in psutil.Process(driver).children():
        with suppress(psutil.NoSuchProcess):  # some live for a moment only
            found += [one for one in server.children() if _name(one) == name]
    return found[-1] if found else None


def _name(process: psutil.Process) -> str | None:
    """None if it has ended."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return None
