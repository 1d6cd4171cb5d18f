"""The frozen models of a run, which score its samples: reference and reward model; both lie on the same devices."""

from __future__ import annotations

from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.planning.placement import ACTOR, GENERATION, REFERENCE, REWARD


def runs_engines(config: RunConfig) -> bool:
    """Whether the run generates samples."""
    return config.task in ("rl", "evaluate")


def has_reference(config: RunConfig) -> bool:
    """Whether the actor is compared with the model that it started from."""
    return config.task == "rl" and config.algorithm.kl_coef > 0


def has_reward_model(config: RunConfig) -> bool:
    """Whether a model is among the sources of rewards."""
    return runs_engines(config) and config.reward.model.path is not None


def frozen_models(config: RunConfig) -> tuple[str, ...]:
    """Names of the frozen models."""
    return (REFERENCE,) * has_reference(config) + (REWARD,) * has_reward_model(config)


def frozen_home(config: RunConfig) -> str | None:
    """GENERATION or ACTOR, the devices that hold the frozen models; None: there are none."""
    if not frozen_models(config):
        return None
    if config.placement.reference != "auto":
        return config.placement.reference
    return ACTOR if config.trainer.deterministic else GENERATION
