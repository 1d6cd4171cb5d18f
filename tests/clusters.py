"""A local cluster with the limits that tests want."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhfspec_mega.cluster.local import LocalCluster

LIMITS = {"call_timeout": 60.0, "start_timeout": 120.0, "heartbeat_timeout": 60.0, "max_restarts": 3}


def local_cluster(directory: Path, *, use_gpus: bool = False, **limits: Any) -> LocalCluster:
    """Logs go to `directory`/logs; the caller closes it."""
    return LocalCluster(directory / "logs", threads=1, use_gpus=use_gpus, **(LIMITS | limits))
