"""Whether actor and critic can train in one pass, with their pipelines in opposite directions (placement.fuse)."""

from __future__ import annotations

from rlhfspec_mega.config.critic import critic_parallel, has_critic
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.errors import UserError


def fuses(config: RunConfig) -> bool:
    """Whether the critic's pipeline is laid out so that updates can be fused with the actor's."""
    return has_critic(config) and config.placement.fuse != "off" and obstacle(config) is None


def check_fusion(config: RunConfig) -> None:
    """Raises UserError if placement.fuse=always cannot be had."""
    if has_critic(config) and config.placement.fuse == "always" and (reason := obstacle(config)):
        raise UserError(f"placement.fuse=always is not possible: {reason}, or use placement.fuse=auto.")


def obstacle(config: RunConfig) -> str | None:
    """Why the actor's and the critic's update cannot be one pass, and what to change; None if they can."""
    actor, (tensor, pipeline) = config.actor, critic_parallel(config)
    if actor.pipeline_parallel == 1:
        return "the actor has one pipeline stage, set actor.pipeline_parallel=2 or more"
    if actor.virtual_pipeline > 1:
        return "the actor's schedule is interleaved, set actor.virtual_pipeline=1"
    if tensor != actor.tensor_parallel:
        return (
            f"actor and critic have different tensor-parallel sizes, set critic.tensor_parallel={actor.tensor_parallel}"
        )
    if actor.pipeline_parallel % pipeline:
        return (
            f"the critic's {pipeline} pipeline stages do not divide the actor's {actor.pipeline_parallel}, set "
            f"critic.pipeline_parallel={actor.pipeline_parallel}"
        )
    return None
