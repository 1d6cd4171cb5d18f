"""What the planner of fused passes knows of a model: the work and the memory of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.activations import Pass, kept_bytes
from rlhfspec_mega.planning.megatron_tensors import ParallelLayout, parameters_per_rank
from rlhfspec_mega.planning.memory import DTYPE_BYTES


@dataclass(frozen=True)
class FusedModel:
    """A model of a fused pass.

    Attributes:
        stages: of its pipeline.
        parameters: on each stage, those that take part in matrix products.
        activation: bytes that a token keeps on each stage until its backward.
    """

    name: str
    stages: int
    parameters: Sequence[float]
    activation: Sequence[float]


def fused_model(
    name: str,
    shape: ModelShape,
    stages: int,
    tensor_parallel: int,
    *,
    sequence_parallel: bool,
    recompute: bool,
    dtype: str,
) -> FusedModel:
    """A model by its shape and its parallel sizes."""
    parameters = parameters_per_rank(shape, ParallelLayout(1, stages, 1))
    if stages > 1 or not shape.tie_embeddings:
        parameters[0] -= shape.vocab_size * shape.hidden_size  # to look up an embedding takes no time
    one = Pass(
        tokens=1,
        rows=1,
        tensor_parallel=tensor_parallel,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        chunk=1,
        size=DTYPE_BYTES[dtype],
        layers=shape.num_layers // stages,
    )
    return FusedModel(name, stages, [float(max(count, 1)) for count in parameters], [kept_bytes(shape, one)] * stages)
