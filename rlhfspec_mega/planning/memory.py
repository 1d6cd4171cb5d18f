"""Estimated bytes of actor ranks, engines, drafts and the reference, from the model's shape and the run's sizes."""

from __future__ import annotations

from dataclasses import dataclass

from rlhfspec_mega.draft.shape import TAPS, DraftShape
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.activations import Pass, peak_bytes
from rlhfspec_mega.planning.megatron_tensors import ParallelLayout, buffers, parameters_per_rank
from rlhfspec_mega.planning.tree import BACKLOG, STEPS_KEPT

GIB = 2**30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
OPTIMIZER_BYTES = 12  # of a parameter: fp32 weights and two moments of AdamW
LOGITS_AT_ONCE = 2**25  # most scores (rows x vocabulary) that an engine, or its draft, holds at once
# Bytes per score: fp32 logits, the same over the temperature, and noise and their sum in float64. Bytes of noise: the
# float64 noise, and the random numbers that it is made from.
_SCORE_BYTES, _NOISE_BYTES, _RANDOM_BYTES = 24, 8, 12
_TRAINED_POSITIONS, _TRAINED_DEPTH = 512, 5  # of one training step of a draft
_CHUNK_COPIES = 4  # fp32 copies of a chunk's logits: over the temperature, their exponentials, and two products


@dataclass(frozen=True)
class ActorMemory:
    """Bytes on one actor rank."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of one generation engine without its draft. `packed` is a copy of matrices in a CPU's own layout."""

    weights: int
    packed: int
    kv: int
    scores: int

    @property
    def total(self) -> int:
        return self.weights + self.packed + self.kv + self.scores


@dataclass(frozen=True)
class DraftMemory:
    """Bytes of a draft: in the one actor rank that holds it, and in each engine."""

    actor: int
    engine: int


@dataclass(frozen=True)
class ActorPlan:
    """Settings that determine an actor rank's memory, besides the model's shape.

    Attributes:
        microbatch_tokens: most tokens in one forward and backward pass.
        max_sequence: tokens of the longest sequence.
        logprob_chunk: tokens whose fp32 logits exist at the same time.
        packed: whether a micro-batch is one row (rl.packing.Batching).
    """

    layout: ParallelLayout
    dtype: str
    sequence_parallel: bool
    recompute: bool
    microbatch_tokens: int
    max_sequence: int
    logprob_chunk: int
    packed: bool = True


@dataclass(frozen=True)
class DraftPlan:
    """Settings that determine a draft's memory, besides its shape.

    Attributes:
        buffer_tokens: tokens whose hidden states are kept to train the draft; 0: it is not trained.
        slots: samples that an engine decodes at once.
        positions: tokens of the longest sequence.
        nodes: most draft tokens of a sample in a step.
        drafted: most of these that the draft is run on.
        depth: most layers of draft tokens.
    """

    buffer_tokens: int
    actor_dtype: str
    slots: int
    positions: int
    nodes: int
    drafted: int
    depth: int
    engine_dtype: str
    device: str


@dataclass(frozen=True)
class ReferencePlan:
    """Settings that determine the memory of a frozen model's rank, besides the model's shape.

    Attributes:
        batch_tokens: most tokens, padding included, in one forward pass.
        logit_chunk: tokens whose fp32 logits exist at the same time.
    """

    tensor_parallel: int
    pipeline_parallel: int
    dtype: str
    batch_tokens: int
    logit_chunk: int


def stage_memory(shape: ModelShape, plan: ActorPlan, stage: int) -> ActorMemory:
    """Bytes of the fullest actor rank of a pipeline stage.

    Weights, gradients and optimizer are exact; E is the length of Megatron's buffers and O the largest number of
    parameters that one data-parallel rank owns (planning.megatron_tensors), b are bytes per weight:
        weights      E b
        gradients    4 E: Megatron reduces in fp32
        optimizer    8 O in fp32 (Adam's two moments), 12 O in bf16 (with fp32 main weights): the distributed optimizer
                     splits them (ZeRO stage 1, arXiv 1910.02054)
        activations  planning.activations, within 6% of what was counted on a CPU
    """
    layout, size = plan.layout, DTYPE_BYTES[plan.dtype]
    held = buffers(shape, layout, stage)
    elements, owned = sum(one.elements for one in held), max(map(sum, zip(*(one.owned for one in held), strict=True)))
    tokens = plan.microbatch_tokens
    largest = Pass(
        tokens=tokens,
        rows=1 if plan.packed else max(1, tokens // plan.max_sequence),
        tensor_parallel=layout.tensor,
        sequence_parallel=plan.sequence_parallel,
        recompute=plan.recompute,
        chunk=plan.logprob_chunk,
        size=size,
        layers=shape.num_layers // (layout.pipeline * layout.chunks),
        first=stage == 0,
        last=stage == layout.pipeline - 1,
        kept=_micro_batches_kept(layout, stage),
    )
    return ActorMemory(
        weights=elements * size,
        gradients=4 * elements,
        optimizer=(8 if plan.dtype == "float32" else 12) * owned,
        activations=peak_bytes(shape, largest),
    )


def checkpoint_bytes(shape: ModelShape, dtype: str) -> int:
    """Bytes of a checkpoint: weights, and the optimizer's fp32 weights and two moments."""
    return shape.parameters * (DTYPE_BYTES[dtype] + OPTIMIZER_BYTES)


def saving_bytes(shape: ModelShape, dtype: str) -> int:
    """Host memory of all nodes together for checkpoints in the background.

    It is the copy of all ranks, which is kept for the next save, and while one is written the optimizer's whole
    tensors, gathered on the first data-parallel ranks.
    """
    return checkpoint_bytes(shape, dtype) + shape.parameters * OPTIMIZER_BYTES


def actor_memory(shape: ModelShape, plan: ActorPlan) -> ActorMemory:
    """Bytes of the actor rank that needs most."""
    stages = (stage_memory(shape, plan, stage) for stage in range(plan.layout.pipeline))
    return max(stages, key=lambda one: one.total)


def _micro_batches_kept(layout: ParallelLayout, stage: int) -> int:
    """Passes of a model chunk whose activations a stage keeps at most (Megatron's 1F1B and interleaved schedules)."""
    later = layout.pipeline - stage - 1
    if layout.chunks == 1:
        return later + 1
    return 2 * later + (layout.chunks - 1) * layout.pipeline + 1


def engine_memory(shape: ModelShape, slots: int, positions: int, dtype: str, device: str) -> EngineMemory:
    """Bytes of one engine: weights, keys and values of every slot at full length, and scores for choosing tokens.

    kv = slots x positions x layers x 2 x KV heads x head_dim x bytes per number. On a CPU every matrix of the layers
    and the head counts twice, because a copy in another layout is kept; where a CPU cannot compute in bfloat16, this
    overestimates.
    """
    head = shape.vocab_size * shape.hidden_size
    packed = shape.num_layers * _matrices(shape, shape.hidden_size) + head if device == "cpu" else 0
    return EngineMemory(
        weights=shape.parameters * DTYPE_BYTES[dtype],
        packed=packed * DTYPE_BYTES[dtype],
        kv=slots * positions * _kv_bytes(shape, dtype),
        scores=_score_bytes(shape, slots, slots, 1),
    )


def verified_memory(target: ModelShape, plan: DraftPlan) -> int:
    """Bytes in an engine of what a step verifies: room for draft tokens in every slot's cache, scores at them."""
    room = plan.nodes * _kv_bytes(target, plan.engine_dtype)
    scores = _score_bytes(target, plan.slots, plan.slots * (1 + plan.nodes), 1 + plan.depth)
    return plan.slots * room + scores - _score_bytes(target, plan.slots, plan.slots, 1)


def draft_memory(draft: DraftShape, plan: DraftPlan) -> DraftMemory:
    """Bytes of a draft with P weights, in training and in an engine.

    actor   4 P if it is not trained. Otherwise 28 P, all in fp32: weights, gradients, two moments, and copies of
            weights and moments with which a refresh is undone. Further: the target's embedding and head in fp32; 4
            times the hidden size for each token of the buffer; for each position of a training batch the target's
            distribution, and logits and their log-softmax for each of 5 drafted tokens.
    engine  weights (on a CPU most of them twice, as in engine_memory, those of keys and values three times, and at most
            once more in 8 bits); keys and values of every slot, with room for the draft tokens of a step; hidden states
            that the draft has not read yet; what a step verifies.
    """
    hidden, weights, target = draft.hidden_size, draft.parameters, draft.target
    actor = 4 * weights
    if plan.buffer_tokens:
        actor = 28 * weights + 2 * 4 * target.vocab_size * hidden
        actor += plan.buffer_tokens * (TAPS + 1) * hidden * DTYPE_BYTES[plan.actor_dtype]
        actor += _TRAINED_POSITIONS * (1 + 2 * _TRAINED_DEPTH) * 4 * draft.vocab_size
    size = DTYPE_BYTES[plan.engine_dtype]
    matrices = _matrices(draft, 2 * hidden) + (TAPS * hidden + draft.vocab_size) * hidden
    keys_values = 2 * draft.num_kv_heads * draft.head_dim * 2 * hidden
    copied = matrices * (size + 1) + keys_values * size if plan.device == "cpu" else 0
    kv = (plan.positions + plan.drafted) * _kv_bytes(draft, plan.engine_dtype)
    unread = (BACKLOG + 2 * STEPS_KEPT + plan.depth + 1) * TAPS * hidden * size
    of_draft = weights * size + copied + plan.slots * (kv + unread)
    return DraftMemory(actor, of_draft + verified_memory(target, plan))


def reference_memory(shape: ModelShape, plan: ReferencePlan) -> int:
    """Bytes of the rank of a frozen model that needs most while it scores.

    With P = parameters_per_rank and b bytes per weight, P b for the weights, and the larger of two peaks in the forward
    pass, of which TP divides all but the residual stream:
        in a layer    per token, 6 hidden (residual stream, norms and sums), 4 ffn (gate, up, and the parts of their
                      product), and twice q, k, v and the result of attention
        at the head   per token, 3 hidden, b bytes per vocabulary entry for the logits, and the larger of the same again
                      (Megatron transposes the logits) and _CHUNK_COPIES fp32 numbers per vocabulary entry of a chunk
    On a GPU the weights are on the device only during a call; their copy in host memory is not counted.
    """
    size, tp, tokens = DTYPE_BYTES[plan.dtype], plan.tensor_parallel, plan.batch_tokens
    heads = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    layer = tokens * (6 * shape.hidden_size + (4 * shape.ffn_size + 2 * heads) // tp) * size
    logits = tokens * shape.vocab_size // tp * size
    chunk = min(plan.logit_chunk, tokens) * shape.vocab_size // tp * 4 * _CHUNK_COPIES
    head = tokens * 3 * shape.hidden_size * size + logits + max(logits, chunk)
    layout = ParallelLayout(tp, plan.pipeline_parallel)
    return max(parameters_per_rank(shape, layout)) * size + max(layer, head)


def _matrices(shape: ModelShape | DraftShape, inputs: int) -> int:
    """Number of weights in a layer's matrices; those of q, k and v have `inputs` inputs."""
    heads = shape.num_heads + 2 * shape.num_kv_heads
    mixed = shape.num_heads * shape.head_dim
    return heads * shape.head_dim * inputs + shape.hidden_size * (mixed + 3 * shape.ffn_size)


def _score_bytes(shape: ModelShape, slots: int, rows: int, positions: int) -> int:
    """Bytes for choosing tokens at `rows` positions, with noise for `positions` positions of every slot."""
    at_once = max(1, LOGITS_AT_ONCE // shape.vocab_size)
    noise = slots * (_NOISE_BYTES * positions + _RANDOM_BYTES)
    return shape.vocab_size * (_SCORE_BYTES * min(rows, at_once) + noise)


def _kv_bytes(shape: ModelShape | DraftShape, dtype: str) -> int:
    """Bytes of the keys and values of one token."""
    return shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * DTYPE_BYTES[dtype]
