"""Bytes that an actor rank and an engine need, estimated from the model's shape and the run's sizes."""

from __future__ import annotations

from dataclasses import dataclass

from rlhfspec_mega.models.shape import ModelShape

GIB = 2**30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class ActorMemory:
    """Bytes on the actor rank that needs most."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of one generation engine."""

    weights: int
    kv: int

    @property
    def total(self) -> int:
        return self.weights + self.kv


@dataclass(frozen=True)
class ActorPlan:
    """What an actor rank's memory depends on besides the shape.

    Attributes:
        microbatch_tokens: most tokens of one forward and backward pass.
        logprob_chunk: tokens whose fp32 logits exist at once.
    """

    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    dtype: str
    sequence_parallel: bool
    recompute: bool
    microbatch_tokens: int
    logprob_chunk: int


def weights_per_rank(shape: ModelShape, tensor_parallel: int, pipeline_parallel: int) -> int:
    """Weights (a count, not bytes) of the pipeline stage that holds most, divided by the tensor-parallel size.

    A stage holds layers / PP layers. The first stage adds the input embedding and the last one the output layer and
    the final norm; tied embeddings lie on both, since each stage computes with its own copy. Norm weights and QK
    norms are not split by tensor parallelism but counted as if they were: under 0.1% of a layer.
    """
    embedding = shape.vocab_size * shape.hidden_size
    outside_layers = shape.hidden_size + embedding * (1 if shape.tie_embeddings else 2)
    layer = (shape.parameters - outside_layers) // shape.num_layers
    stage = layer * (shape.num_layers // pipeline_parallel)
    stage += outside_layers if pipeline_parallel == 1 else embedding + shape.hidden_size
    return -(-stage // tensor_parallel)


def actor_memory(shape: ModelShape, plan: ActorPlan) -> ActorMemory:
    """Bytes of the actor rank that needs most.

    With P = weights_per_rank and b = bytes per weight:
        weights      P b
        gradients    4 P: Megatron reduces in fp32
        optimizer    8 P / DP in fp32 (Adam's two moments), 12 P / DP in bf16 (fp32 main weights too): the distributed
                     optimizer splits them (ZeRO stage 1, arXiv 1910.02054)
        activations  rough: what a layer keeps for its backward pass per token is 6 hidden + 2 head_dim (heads + KV
                     heads) + 4 ffn numbers; all but the residual stream's share of 4 hidden is split by TP, that one
                     only under sequence parallelism (after arXiv 2205.05198, for SwiGLU and attention that stores no
                     scores). 1F1B keeps PP micro-batches of layers / PP layers on the first stage, so all layers count.
                     With recompute only each layer's input (hidden) stays, plus one layer in full.
        logits       3 x 4 bytes per token of a chunk and vocabulary entry of the rank: logits, probabilities, gradient
    """
    weights = weights_per_rank(shape, plan.tensor_parallel, plan.pipeline_parallel)
    size, tp = DTYPE_BYTES[plan.dtype], plan.tensor_parallel
    stream_split = tp if plan.sequence_parallel else 1
    split = 2 * shape.hidden_size + 2 * shape.head_dim * (shape.num_heads + shape.num_kv_heads) + 4 * shape.ffn_size
    layer = 4 * shape.hidden_size // stream_split + split // tp
    kept = shape.num_layers * shape.hidden_size // stream_split + layer if plan.recompute else shape.num_layers * layer
    chunk = min(plan.logprob_chunk, plan.microbatch_tokens)
    return ActorMemory(
        weights=weights * size,
        gradients=4 * weights,
        optimizer=(8 if plan.dtype == "float32" else 12) * weights // plan.data_parallel,
        activations=plan.microbatch_tokens * kept * size,
        logits=3 * 4 * chunk * shape.vocab_size // tp,
    )


def engine_memory(shape: ModelShape, slots: int, positions: int, dtype: str) -> EngineMemory:
    """Bytes of one engine: all weights, and keys and values of every slot at full length.

    kv = slots x positions x layers x 2 x KV heads x head_dim x bytes per number.
    """
    size = DTYPE_BYTES[dtype]
    per_token = shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * size
    return EngineMemory(weights=shape.parameters * size, kv=slots * positions * per_token)
