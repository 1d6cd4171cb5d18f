"""How far a run reaches: which Ray cluster it joins, and which transport carries its weights."""

from __future__ import annotations

import os

from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.schema.system import LauncherConfig


def ray_address(launcher: LauncherConfig) -> str | None:
    """The running Ray cluster to join: the one given, or the one a Ray job runs in; None: an own instance."""
    return launcher.address or os.environ.get("RAY_ADDRESS") or None


def weight_transport(config: RunConfig) -> str:
    """ "shared_memory" where all workers are on this machine, "collective" where they may not be, unless one is set."""
    if config.resharding.transport != "auto":
        return config.resharding.transport
    one_machine = config.launcher.kind == "local" or ray_address(config.launcher) is None
    return "shared_memory" if one_machine else "collective"
