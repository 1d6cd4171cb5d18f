"""The planner of fused updates, from the descriptions of actor and critic."""

from __future__ import annotations

import threading

from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.megatron.description import ModelDescription
from rlhfspec_mega.planning.pipeline.fused_model import FusedModel, fused_model
from rlhfspec_mega.planning.pipeline.fusion import FusionPlanner, compile_search


def fusion_planner(config: RunConfig, actor: ModelDescription, critic: ModelDescription) -> FusionPlanner:
    """Plans by costs that are learnt in the run; under trainer.deterministic by numbers of parameters alone."""
    # The first plan after an installation compiles the search, which takes seconds: meanwhile the run starts.
    threading.Thread(target=compile_search, name="compile the search", daemon=True).start()
    return FusionPlanner(
        _fused(actor),
        _fused(critic),
        always=config.placement.fuse == "always",
        fixed_costs=config.trainer.deterministic,
    )


def _fused(model: ModelDescription) -> FusedModel:
    parallel = model.parallel
    return fused_model(
        model.name,
        model.shape,
        parallel.pipeline,
        parallel.tensor,
        sequence_parallel=parallel.sequence,
        recompute=model.recompute,
        dtype=model.dtype,
    )
