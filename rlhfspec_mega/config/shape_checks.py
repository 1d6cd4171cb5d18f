"""Checks of a run against its model's shape: parallel sizes, lengths, and features that Megatron lacks."""

from __future__ import annotations

from rlhfspec_mega.config.critic import critic_parallel, critic_shape, has_critic
from rlhfspec_mega.config.frozen import frozen_home
from rlhfspec_mega.config.hardware import device_type
from rlhfspec_mega.config.model_shape import BYTE_VOCABULARY
from rlhfspec_mega.config.reward_model import reward_shape
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.sglang import check_positions
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.placement import GENERATION

# The constants Megatron hard-codes for Llama 3's rotary scaling; only the factor can be chosen.
MEGATRON_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192.0}


def check_shape(config: RunConfig, shape: ModelShape) -> None:
    """Raises UserError for a shape that Megatron-core cannot express."""
    if config.model.path is None and shape.vocab_size < BYTE_VOCABULARY:
        raise UserError(
            f"model.vocab_size={shape.vocab_size} is less than the {BYTE_VOCABULARY} byte tokens of models made here: "
            "leave it null."
        )
    for key, value in MEGATRON_ROPE.items():
        given = (shape.rope_scaling or {}).get(key, value)
        if given != value:
            raise UserError(f"The model's rope scaling has {key}={given:g}; Megatron-core supports only {value:g}.")
    if shape.rope_theta != int(shape.rope_theta):
        raise UserError(f"The model's rope_theta={shape.rope_theta} is no whole number, which Megatron-core needs.")
    if shape.num_heads % shape.num_kv_heads:
        raise UserError(
            f"model.num_heads={shape.num_heads} is no multiple of num_kv_heads={shape.num_kv_heads}: change one."
        )
    if shape.head_dim % 2:
        raise UserError(
            f"model.head_dim={shape.head_dim} is odd, but rotary embedding turns pairs: use an even number."
        )


def check_parallel(config: RunConfig, shape: ModelShape) -> None:
    """Check the actor's parallel sizes against the model's shape, and known silent faults of pipeline communication.

    Raises:
        UserError: a size that does not divide, or a combination for which Megatron computes wrong gradients.
    """
    actor, name = config.actor, f"model {config.model.path or config.model.name}"
    tensor, chunks = actor.tensor_parallel, actor.pipeline_parallel * actor.virtual_pipeline
    _check_tensor_parallel("actor.tensor_parallel", tensor, shape, name)
    _check_tensor_parallel(
        "placement.reference_tensor_parallel", config.placement.reference_tensor_parallel, shape, name
    )
    if shape.num_layers % chunks:
        valid = [n for n in range(1, shape.num_layers + 1) if shape.num_layers % n == 0]
        raise UserError(
            f"actor.pipeline_parallel={actor.pipeline_parallel} times virtual_pipeline={actor.virtual_pipeline}: "
            f"{name} has {shape.num_layers} layers: their product must be {_either(valid)}."
        )
    if actor.sequence_parallel and tensor == 1:
        raise UserError("actor.sequence_parallel=true needs actor.tensor_parallel above 1: set it to false.")
    if actor.virtual_pipeline > 1 and actor.batch_p2p:
        raise UserError(
            "actor.batch_p2p=true gives wrong gradients with actor.virtual_pipeline above 1: set actor.batch_p2p=false."
        )
    if actor.overlap_p2p and device_type(config.cluster) == "cpu":
        raise UserError("actor.overlap_p2p=true corrupts gradients on a CPU (gloo): set actor.overlap_p2p=false.")
    if actor.overlap_p2p and actor.virtual_pipeline == 1:
        raise UserError(
            "actor.overlap_p2p=true works with the interleaved schedule only: set actor.virtual_pipeline=2 or "
            "actor.overlap_p2p=false."
        )


def check_critic(config: RunConfig, actor: ModelShape) -> None:
    """Check the critic's directory and parallel sizes; raises UserError."""
    if not has_critic(config):
        return
    shape, (tensor, pipeline) = critic_shape(config, actor), critic_parallel(config)
    name = f"the critic {config.critic.path or config.model.path or config.model.name}"
    _check_tensor_parallel("critic.tensor_parallel", tensor, shape, name)
    if shape.num_layers % pipeline:
        valid = [n for n in range(1, shape.num_layers + 1) if shape.num_layers % n == 0]
        raise UserError(
            f"critic.pipeline_parallel={pipeline}: {name} has {shape.num_layers} layers: use {_either(valid)}."
        )


def check_reward_model(config: RunConfig) -> None:
    """Check the reward model's directory, and the parallel sizes of where it lies; raises UserError."""
    shape, actor, name = reward_shape(config), config.actor, f"the reward model {config.reward.model.path}"
    if shape is None:
        return
    option, tensor = "actor.tensor_parallel", actor.tensor_parallel
    stages = actor.pipeline_parallel * actor.virtual_pipeline
    if frozen_home(config) == GENERATION:
        option, tensor = "placement.reference_tensor_parallel", config.placement.reference_tensor_parallel
        stages = 1
    _check_tensor_parallel(option, tensor, shape, name)
    if shape.num_layers % stages:
        raise UserError(
            f"{name} has {shape.num_layers} layers, which the {stages} stages of the actor do not divide: use "
            "placement.reference=generation, or other sizes of the actor."
        )


def _check_tensor_parallel(option: str, size: int, shape: ModelShape, name: str) -> None:
    parts = (shape.num_heads, shape.num_kv_heads, shape.ffn_size)
    if any(part % size for part in parts):
        valid = [n for n in range(1, shape.num_kv_heads + 1) if not any(part % n for part in parts)]
        raise UserError(
            f"{option}={size}: {name} has {shape.num_heads} heads, {shape.num_kv_heads} key-value heads "
            f"and a feed-forward size of {shape.ffn_size}: use {_either(valid)}."
        )


def _either(numbers: list[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


def check_lengths(config: RunConfig, shape: ModelShape) -> None:
    """Raises UserError for sequences beyond the model's positions."""
    rollout = config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    parts = f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} plus max_new_tokens={rollout.max_new_tokens}"
    if longest > shape.max_positions:
        raise UserError(
            f"{parts} is more than the {shape.max_positions} positions of model "
            f"{config.model.path or config.model.name}: lower one of them."
        )
    check_positions(config, longest, shape.max_positions)
    budget = config.trainer.max_tokens_per_microbatch
    if longest > budget:
        raise UserError(
            f"{parts} does not fit trainer.max_tokens_per_microbatch={budget}: lower one of the two or raise it to "
            f"{longest}."
        )
