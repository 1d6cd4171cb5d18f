"""What a fused pass saves of the updates of actor and critic, before anything has run."""

from __future__ import annotations

from rlhfspec_mega.config.fusion import fuses
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.sizes import Sizes
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.pipeline.fused_model import fused_model
from rlhfspec_mega.planning.pipeline.fusion import FusionPlanner
from rlhfspec_mega.planning.placement import ACTOR, CRITIC


def fused_share(config: RunConfig, shape: ModelShape, sizes: Sizes, micro_batches: float) -> float:
    """Seconds of a fused pass over those of one model after the other; 1 where updates are not fused.

    Args:
        micro_batches: of an update in each pipeline of the actor. They are taken to be of equal length.
    """
    critic, actor = sizes.critic, config.actor
    if critic is None or not fuses(config):
        return 1.0
    layout = critic.layout
    planner = FusionPlanner(
        fused_model(
            ACTOR,
            shape,
            actor.pipeline_parallel,
            actor.tensor_parallel,
            sequence_parallel=actor.sequence_parallel,
            recompute=actor.recompute,
            dtype=actor.dtype,
        ),
        fused_model(
            CRITIC,
            critic.shape,
            layout.pipeline,
            layout.tensor,
            sequence_parallel=critic.sequence_parallel,
            recompute=actor.recompute,
            dtype=actor.dtype,
        ),
        always=config.placement.fuse == "always",
        fixed_costs=True,
    )
    beside = layout.data // sizes.data_parallel  # pipelines of the critic on the devices of one of the actor
    tokens = config.trainer.max_tokens_per_microbatch
    of_actor, of_critic = (max(round(count), 1) for count in (micro_batches, micro_batches / beside))
    plan = planner.plan({ACTOR: [[tokens] * of_actor], CRITIC: [[tokens] * of_critic] * beside})
    return plan.makespan / plan.serial if plan else 1.0
