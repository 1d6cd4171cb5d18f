"""The planner of fused updates, from the descriptions of actor and critic."""

from __future__ import annotations

import threading

from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.megatron.description import ModelDescription
from rlhfspec_mega.planning.activations import Pass, kept_bytes
from rlhfspec_mega.planning.megatron_tensors import ParallelLayout, parameters_per_rank
from rlhfspec_mega.planning.memory import DTYPE_BYTES
from rlhfspec_mega.planning.pipeline.fusion import FusedModel, FusionPlanner, compile_search


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
    shape, stages = model.shape, model.parallel.pipeline
    parameters = parameters_per_rank(shape, ParallelLayout(1, stages, 1))
    if stages > 1 or not shape.tie_embeddings:
        parameters[0] -= shape.vocab_size * shape.hidden_size  # to look up an embedding takes no time
    one = Pass(
        tokens=1,
        rows=1,
        tensor_parallel=model.parallel.tensor,
        sequence_parallel=model.parallel.sequence,
        recompute=model.recompute,
        chunk=1,
        size=DTYPE_BYTES[model.dtype],
        layers=shape.num_layers // stages,
    )
    return FusedModel(
        model.name, stages, [float(max(count, 1)) for count in parameters], [kept_bytes(shape, one)] * stages
    )
