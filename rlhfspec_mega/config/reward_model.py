"""The reward model of a run: its shape, found in its directory, and what that directory must hold."""

from __future__ import annotations

from pathlib import Path

from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.shape import ModelShape


def reward_shape(config: RunConfig) -> ModelShape | None:
    """The shape of the reward model; None without one.

    Raises UserError for a directory that cannot be read, or holds no classifier with one score.
    """
    path = config.reward.model.path
    if path is None:
        return None
    from rlhfspec_mega.models.hf_config import read_shape

    if not Path(path).is_dir():
        raise UserError(
            f"reward.model.path={path} does not exist: give a directory with config.json and *.safetensors."
        )
    shape = read_shape(path)
    if not shape.value_head:
        raise UserError(
            f"reward.model.path={path} is a language model: a reward model is a sequence classifier with one score "
            "(architectures in config.json ends in ForSequenceClassification)."
        )
    return shape


def check_reward_weights(config: RunConfig) -> None:
    """Refuse a directory whose weights do not match its config.json; raises UserError."""
    path, shape = config.reward.model.path, reward_shape(config)
    if path is None or shape is None:
        return
    from rlhfspec_mega.models.hf_directory import HfWeights
    from rlhfspec_mega.models.mapping import mapping_for

    HfWeights(path).check(mapping_for(shape.architecture).hf_tensors(shape))
