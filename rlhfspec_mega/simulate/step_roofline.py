"""Costs of a step's phases from the GPU's data sheet, for clusters on which no run has been measured."""

from __future__ import annotations

from dataclasses import asdict, replace
from types import SimpleNamespace

from rlhfspec_mega.config.device_plan import SGLANG_SHARE
from rlhfspec_mega.config.reach import weight_transport
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.schema.system import GpuConfig
from rlhfspec_mega.config.sglang import engine_gpus, memory_share
from rlhfspec_mega.config.sizes import Sizes
from rlhfspec_mega.config.speculation import drafts
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.placement import REFERENCE, REWARD
from rlhfspec_mega.simulate.fused_update import fused_share
from rlhfspec_mega.simulate.roofline import REACHED, all_reduce_seconds, engine_roofline
from rlhfspec_mega.simulate.step_costs import AssumedLengths, StepCosts
from rlhfspec_mega.simulate.workload import LengthDistribution

# Assumed and not measured. Lengths are shares of rollout.max_prompt_tokens and rollout.max_new_tokens.
ASSUMED = SimpleNamespace(
    prompt=0.25,
    median=0.25,  # of the lognormal response lengths, which are cut off at rollout.max_new_tokens
    sigma=0.99,
    correlation=0.6,  # between the log lengths of two samples of one prompt
    train_compute=0.4,  # share of the GPU's peak that forward and backward passes reach
    draft_share=0.03,  # weights of a draft as a share of the model's
)
_GRADIENT_BYTES, _WEIGHT_BYTES = 4, 2
_OPTIMIZER_BYTES = 28  # read and written for each weight: fp32 weight, two moments, gradient, and the bf16 weight


def roofline_costs(config: RunConfig, shape: ModelShape, sizes: Sizes) -> StepCosts:
    """Costs of a run on GPUs of the cluster's data sheet; `source` has all that was assumed."""
    gpu, gpus = config.cluster.gpu, engine_gpus(config)
    share = memory_share(config, sizes.placement) or SGLANG_SHARE
    engine = engine_roofline(
        gpu.name,
        gpu,
        shape,
        ASSUMED.draft_share if drafts(config) else 0.0,
        gpus=gpus,
        slots=config.rollout.max_running_requests,
        memory=share * gpu.memory_gib * 2**30,
    )
    frozen = _frozen_share(shape, sizes)
    engine = replace(
        engine, scoring_seconds=frozen * engine.scoring_seconds, scoring_start=frozen * engine.scoring_start
    )
    actor = config.actor
    forward = _pass_seconds(gpu, shape, actor.tensor_parallel, actor.pipeline_parallel)
    bubble = _bubble(config, sizes)
    fused = fused_share(config, shape, sizes, _micro_batches(config, sizes))
    passes = 4 if actor.recompute else 3  # a backward pass costs two forward passes
    exchange, step = _exchange_seconds(config, sizes), _step_seconds(gpu, sizes)
    values = _value_seconds(gpu, sizes)
    reshard, by = _reshard_seconds(config, shape)
    reading = engine.plain.seconds[0] > 0.5 * engine.plain.seconds[-1]
    bounds = {
        "generate": "memory bandwidth" if reading else "compute",
        "reference": "compute",
        "logprobs": "compute",
        "values": "compute",
        "update": "compute" if bubble * fused < 1.5 else "pipeline bubbles",
        "reshard": by,
    }
    return StepCosts(
        engine=engine,
        lengths=AssumedLengths(_lengths(config)),
        rollout_start=0.0,
        stretch=1.0,
        scoring_stretch=1.0,
        reward=0.0,
        reference=frozen * forward * bubble,
        logprobs=forward * bubble,
        values=values,
        update=passes * (forward * bubble + values) * fused,
        optimizer=(exchange + step) * (1 if sizes.critic is None else 2),
        reshard=reshard,
        bounds=bounds,
        source={"kind": "roofline", "device": asdict(gpu), "reached": vars(REACHED), "assumed": vars(ASSUMED)},
    )


def _frozen_share(shape: ModelShape, sizes: Sizes) -> float:
    """Weights of all frozen models over those of the actor; 1 without any, where it does not count."""
    weights = {REFERENCE: shape.parameters, REWARD: sizes.reward_shape.parameters if sizes.reward_shape else 0}
    return sum(weights[model] for model in sizes.frozen_memory) / shape.parameters or 1.0


def _lengths(config: RunConfig) -> LengthDistribution:
    limit = config.rollout.max_new_tokens
    return LengthDistribution(
        median=ASSUMED.median * limit,
        sigma=ASSUMED.sigma,
        correlation=ASSUMED.correlation,
        limit=limit,
        prompt=max(round(ASSUMED.prompt * config.rollout.max_prompt_tokens), 1),
    )


def _pass_seconds(gpu: GpuConfig, shape: ModelShape, tensor: int, pipeline: int) -> float:
    """Seconds of a forward pass per token of a replica: 2 FLOP per weight, and two all-reduces per layer."""
    compute = 2.0 * shape.parameters / (tensor * pipeline * gpu.bf16_tflops * 1e12 * ASSUMED.train_compute)
    # Per token of long messages: only their bandwidth counts, and stages communicate at the same time.
    moved = all_reduce_seconds(gpu, tensor, 2.0 * shape.hidden_size) - (REACHED.all_reduce_start if tensor > 1 else 0)
    return compute + 2 * shape.num_layers * moved / pipeline


def _value_seconds(gpu: GpuConfig, sizes: Sizes) -> float:
    """Seconds of the critic's forward pass per token of a replica of the actor; 0 without a critic."""
    if sizes.critic is None:
        return 0.0
    layout = sizes.critic.layout
    return _pass_seconds(gpu, sizes.critic.shape, layout.tensor, layout.pipeline) * sizes.data_parallel / layout.data


def _bubble(config: RunConfig, sizes: Sizes) -> float:
    """How many times longer a pipeline takes than stages that never wait (1F1B, Narayanan et al. 2021)."""
    stages = config.actor.pipeline_parallel
    return 1.0 + (stages - 1) / (_micro_batches(config, sizes) * config.actor.virtual_pipeline)


def _micro_batches(config: RunConfig, sizes: Sizes) -> float:
    """Micro-batches of an update in each pipeline of the actor; at least 1."""
    lengths = _lengths(config)
    mean = lengths.prompt + min(lengths.median * 2.718 ** (lengths.sigma**2 / 2), lengths.limit)
    tokens = sizes.samples_per_update / sizes.data_parallel * mean
    return max(tokens / config.trainer.max_tokens_per_microbatch, 1.0)


def _exchange_seconds(config: RunConfig, sizes: Sizes) -> float:
    """Seconds to reduce gradients over the data-parallel ranks and to gather the updated weights."""
    replicas, gpu = sizes.data_parallel, config.cluster.gpu
    if replicas < 2:
        return 0.0
    bandwidth = (
        gpu.network_bandwidth * REACHED.network if config.cluster.nodes > 1 else gpu.link_bandwidth * REACHED.link
    )
    return sizes.weights_per_rank * (_GRADIENT_BYTES + _WEIGHT_BYTES) * (replicas - 1) / replicas / (bandwidth * 1e9)


def _step_seconds(gpu: GpuConfig, sizes: Sizes) -> float:
    touched = sizes.weights_per_rank * _OPTIMIZER_BYTES / sizes.data_parallel
    return touched / (gpu.memory_bandwidth * 1e9 * REACHED.memory_bandwidth)


def _reshard_seconds(config: RunConfig, shape: ModelShape) -> tuple[float, str]:
    """Seconds of a weight update, and what they are bound by: every engine receives all weights.

    Stages send one after the other, as if one link carried everything.
    """
    gpu, size = config.cluster.gpu, _WEIGHT_BYTES * shape.parameters
    if weight_transport(config) != "collective":
        return size / (gpu.host_bandwidth * 1e9 * REACHED.host), "host bandwidth"
    if config.cluster.nodes > 1:
        return size / (gpu.network_bandwidth * 1e9 * REACHED.network), "network"
    return size / (gpu.link_bandwidth * 1e9 * REACHED.link), "links between GPUs"
