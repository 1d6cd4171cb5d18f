"""Which Ray cluster a run joins, and which transport carries its weights."""

from __future__ import annotations

import os

from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.schema.system import LauncherConfig


def ray_address(launcher: LauncherConfig) -> str | None:
    """Address of the Ray cluster to join: the one given, or that of the current Ray job.

    None: start an own instance.
    """
    return launcher.address or os.environ.get("RAY_ADDRESS") or None


def weight_transport(config: RunConfig) -> str:
    """The transport that is set, else "shared_memory" if all workers are on this machine, else "collective"."""
    if config.resharding.transport != "auto":
        return config.resharding.transport
    one_machine = config.cluster.nodes == 1 and (config.launcher.kind == "local" or not ray_address(config.launcher))
    return "shared_memory" if one_machine else "collective"
