"""Where the frozen reference of a run lies."""

from __future__ import annotations

from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.planning.placement import ACTOR, GENERATION


def reference_home(config: RunConfig) -> str | None:
    """GENERATION or ACTOR, the devices that hold the frozen reference; None: there is none."""
    if config.algorithm.kl_coef == 0:
        return None
    if config.placement.reference != "auto":
        return config.placement.reference
    return ACTOR if config.trainer.deterministic else GENERATION
