"""A Megatron model as plain data: shape, parallel sizes, whether it learns. The driver can use it without Megatron."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rlhfspec_mega.config.schema.training import ActorConfig, OptimizerConfig
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.placement import Residency


@dataclass(frozen=True)
class ParallelSizes:
    """Parallel sizes of a model, in Megatron's terms.

    Attributes:
        virtual_pipeline: model chunks per pipeline rank; above 1: interleaved schedule.
        sequence: sequence parallelism within the tensor-parallel group.
        context, expert: only 1 is supported.
        opposed_to: pipeline stages of another model on the same ranks, whose pipeline runs the other way, so that both
            can train in one pass; 0: ranks in Megatron's order.

    Raises UserError for other context- or expert-parallel sizes.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    virtual_pipeline: int = 1
    sequence: bool = False
    context: int = 1
    expert: int = 1
    opposed_to: int = 0

    def __post_init__(self) -> None:
        for name, size in (("context", self.context), ("expert", self.expert)):
            if size != 1:
                raise UserError(f"A {name}-parallel size of {size} is not possible: use 1.")

    @classmethod
    def of_actor(cls, config: ActorConfig, ranks: int) -> ParallelSizes:
        """The actor's parallel sizes on this number of ranks, which determines its data-parallel size."""
        data = ranks // (config.tensor_parallel * config.pipeline_parallel)
        return cls(
            config.tensor_parallel, config.pipeline_parallel, data, config.virtual_pipeline, config.sequence_parallel
        )

    @property
    def ranks(self) -> int:
        """Processes that hold the model."""
        return self.tensor * self.pipeline * self.data


class ParallelRanks(NamedTuple):
    """Coordinates of one rank in a model's TP x PP x DP grid."""

    tp: int
    pp: int
    dp: int


@dataclass(frozen=True)
class LogitSettings:
    """How logits become log-probabilities.

    Attributes:
        temperature: sampling temperature T (1 for greedy): log-probs are those of logits / T.
        chunk: tokens whose fp32 logits are in memory at a time.
    """

    vocab_size: int
    temperature: float
    chunk: int


@dataclass(frozen=True)
class Learning:
    """How a trainable model learns.

    Attributes:
        total_updates: optimizer steps of the run, for the learning-rate schedule.
    """

    optimizer: OptimizerConfig
    total_updates: int


@dataclass(frozen=True)
class ModelDescription:
    """One Megatron model.

    Attributes:
        name: the model's name within its run, e.g. "actor"; workers know it by this name.
        checkpoint: Hugging Face directory of a frozen model's weights, loaded on first use; None: `load_weights` is
            called.
        dtype: "float32" or "bfloat16".
        learning: None: frozen.
        rests: where its weights are while it is not used.
        recompute: full activation recomputation.
        overlap_p2p, batch_p2p: Megatron's options of pipeline communication.
    """

    name: str
    shape: ModelShape
    parallel: ParallelSizes
    dtype: str
    logits: LogitSettings
    checkpoint: Path | None = None
    learning: Learning | None = None
    rests: Residency = Residency.DEVICE
    recompute: bool = False
    overlap_p2p: bool = False
    batch_p2p: bool = False


def describe(
    name: str,
    shape: ModelShape,
    config: ActorConfig,
    parallel: ParallelSizes,
    *,
    temperature: float,
    learning: Learning | None = None,
    checkpoint: Path | None = None,
    rests: Residency = Residency.DEVICE,
) -> ModelDescription:
    """A model of the actor's precision with the parallel sizes of `parallel`.

    Args:
        temperature: sampling temperature of the samples; 0 (greedy) counts as 1.
    """
    return ModelDescription(
        name=name,
        shape=shape,
        parallel=parallel,
        checkpoint=checkpoint,
        dtype=config.dtype,
        logits=LogitSettings(shape.vocab_size, temperature or 1.0, config.logprob_chunk),
        learning=learning,
        rests=rests,
        recompute=config.recompute,
        overlap_p2p=config.overlap_p2p,
        batch_p2p=config.batch_p2p,
    )
