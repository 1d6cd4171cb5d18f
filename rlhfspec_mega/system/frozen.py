"""Descriptions of a run's frozen models, the reference and a reward model."""

from __future__ import annotations

from pathlib import Path

from rlhfspec_mega.megatron.description import ModelDescription, ParallelSizes, describe
from rlhfspec_mega.planning.placement import FROZEN, REFERENCE
from rlhfspec_mega.system.setup import Setup


def frozen_descriptions(setup: Setup, parallel: ParallelSizes) -> list[ModelDescription]:
    """Descriptions of the run's frozen models with these parallel sizes."""
    config, found = setup.config, []
    for name in FROZEN:
        place = setup.placement.places.get(name)
        if place is None:
            continue
        shape, path = setup.shape, setup.reference
        if name != REFERENCE:
            assert setup.sizes.reward_shape is not None and config.reward.model.path is not None
            shape, path = setup.sizes.reward_shape, Path(config.reward.model.path)
        temperature = config.rollout.temperature if name == REFERENCE else 1.0
        made = describe(
            name, shape, config.actor, parallel, temperature=temperature, checkpoint=path, rests=place.rests
        )
        found.append(made)
    return found
