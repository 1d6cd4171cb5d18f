"""The critic of a run: its shape, and how it is spread over the actor's ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.megatron_tensors import ParallelLayout


@dataclass(frozen=True)
class CriticPlan:
    """Shape and layout of the critic. `sequence_parallel`: as the actor, if its tensor-parallel size is above 1."""

    shape: ModelShape
    layout: ParallelLayout
    sequence_parallel: bool


def has_critic(config: RunConfig) -> bool:
    """Whether the algorithm has a critic."""
    return config.task == "rl" and config.algorithm.adv_estimator == "gae"


def critic_parallel(config: RunConfig) -> tuple[int, int]:
    """The critic's tensor- and pipeline-parallel sizes: the actor's where it has none of its own."""
    actor, critic = config.actor, config.critic
    return critic.tensor_parallel or actor.tensor_parallel, critic.pipeline_parallel or actor.pipeline_parallel


def critic_shape(config: RunConfig, actor: ModelShape) -> ModelShape:
    """The shape of the directory that the critic starts from, else the actor's, with a value head.

    Raises UserError for a directory that cannot be read, or whose model has another vocabulary or fewer positions.
    """
    path, rollout = config.critic.path, config.rollout
    if path is None:
        return actor.with_value_head()
    from rlhfspec_mega.models.hf_config import read_shape

    if not Path(path).is_dir():
        raise UserError(f"critic.path={path} does not exist: give a directory with config.json and *.safetensors.")
    shape, longest = read_shape(path).with_value_head(), rollout.max_prompt_tokens + rollout.max_new_tokens
    if shape.vocab_size != actor.vocab_size:
        raise UserError(
            f"critic.path={path} has a vocabulary of {shape.vocab_size} tokens and the actor has {actor.vocab_size}: "
            "the critic must read the actor's tokens."
        )
    if longest > shape.max_positions:
        raise UserError(
            f"critic.path={path} has {shape.max_positions} positions, and rollout.max_prompt_tokens plus "
            f"max_new_tokens is {longest}: lower one of them."
        )
    return shape


def check_critic_weights(config: RunConfig) -> None:
    """Refuse a directory whose weights do not match its config.json; raises UserError."""
    if not has_critic(config) or config.critic.path is None:
        return
    from rlhfspec_mega.models.hf_config import read_shape
    from rlhfspec_mega.models.hf_directory import HfWeights
    from rlhfspec_mega.models.mapping import mapping_for

    shape = read_shape(config.critic.path)
    HfWeights(config.critic.path).check(mapping_for(shape.architecture).hf_tensors(shape))


def critic_plan(config: RunConfig, actor: ModelShape, ranks: int) -> CriticPlan | None:
    """The critic on this number of actor ranks; None without one.

    Raises UserError for a shape or for parallel sizes that do not fit.
    """
    if not has_critic(config):
        return None
    shape = critic_shape(config, actor)
    tensor, pipeline = critic_parallel(config)
    if ranks % (tensor * pipeline):
        raise UserError(
            f"critic.tensor_parallel={tensor} times pipeline_parallel={pipeline} does not divide the {ranks} ranks of "
            "the actor, on which the critic lies: change one of them."
        )
    layout = ParallelLayout(tensor, pipeline, ranks // (tensor * pipeline))
    return CriticPlan(shape, layout, config.actor.sequence_parallel and tensor > 1)
