"""Every check across options, made before anything starts; each refusal is one sentence that says what to do."""

from __future__ import annotations

import importlib.util
import re
from operator import attrgetter
from pathlib import Path

from rlhfspec_mega.config.drafting import check_drafting, drafting_note, idle_drafting
from rlhfspec_mega.config.hardware import cpu_has_fast_bf16, device_type, gpu_memory, host_memory
from rlhfspec_mega.config.model_shape import BYTE_VOCABULARY, model_shape
from rlhfspec_mega.config.names import unknown_choice
from rlhfspec_mega.config.output_dir import check_output_dir
from rlhfspec_mega.config.ranges import check_ranges
from rlhfspec_mega.config.reach import ray_address
from rlhfspec_mega.config.reallocation import check_reallocation, idle_reallocation
from rlhfspec_mega.config.schema import RunConfig
from rlhfspec_mega.config.sglang import (
    ENGINE_BYTES,
    check_positions,
    check_sglang,
    check_sleep,
    engines_sleep,
    idle_sglang,
    memory_share,
    uses_sglang,
)
from rlhfspec_mega.config.sizes import Sizes, derive_sizes, reference_home
from rlhfspec_mega.data.chain_sums import ChainSums
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.memory import GIB
from rlhfspec_mega.planning.placement import ACTOR, ENGINE, GENERATION, REFERENCE
from rlhfspec_mega.rollout.sglang_engine.cpu_kernels import NOTICE

# The constants Megatron hard-codes for Llama 3's rotary scaling; only the factor can be chosen.
MEGATRON_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192.0}
ADVANTAGES = ("grpo", "rloo")
LONG_RUN = 100  # steps of a model made here that one would not like to do again
PROCESS_BYTES = int(0.4 * GIB)  # an idle worker with torch and Megatron loaded: 0.35 GiB were measured


def check_config(config: RunConfig) -> Sizes:
    """Refuse what cannot run; return the derived sizes of what can.

    Raises:
        UserError: the first thing found wrong.
    """
    check_ranges(config)
    _check_name(config)
    _check_available(config)
    _check_useless(config)
    check_reallocation(config)
    _check_algorithm(config)
    _check_data(config)
    check_output_dir(config)
    shape = model_shape(config.model)
    check_drafting(config, shape)
    _check_shape(config, shape)
    check_parallel(config, shape)
    _check_lengths(config, shape)
    sizes = derive_sizes(config, shape)
    check_sleep(config, sizes.placement)
    _check_devices(config)
    _check_memory(config, shape, sizes)
    _check_weights_exist(config)
    return sizes


def notes(config: RunConfig) -> list[str]:
    """What will run but probably not as hoped, as sentences for the start of a run."""
    found = []
    dtypes = {config.actor.dtype, config.rollout.dtype or config.actor.dtype}
    if "bfloat16" in dtypes and device_type(config.cluster) == "cpu" and not cpu_has_fast_bf16():
        found.append("This CPU has no bf16 instructions, so bfloat16 is many times slower here than float32.")
    real_kernels = importlib.util.find_spec("sgl_kernel") is not None
    if uses_sglang(config) and device_type(config.cluster) == "cpu" and not real_kernels:
        found.append(NOTICE)
    if config.data.kind == "files" and config.model.path is None:
        found.append(f"Model {config.model.name} is warmed up on chain sums only: data of yours may be beyond it.")
    if note := drafting_note(config):
        found.append(note)
    trainer = config.trainer
    if trainer.checkpoint_every == 0 and (trainer.steps > LONG_RUN or config.model.path is not None):
        found.append(
            "trainer.checkpoint_every=0 saves at the end only, so a failure before it costs all steps: set e.g. "
            "trainer.checkpoint_every=10."
        )
    return found


def _check_name(config: RunConfig) -> None:
    if not re.fullmatch(r"[\w][\w.+=-]*", config.name):
        raise UserError(f"name={config.name!r} cannot name a directory: use letters, digits, '_', '-', '.', '+', '='.")


def _check_available(config: RunConfig) -> None:
    """Options that exist but whose other half is not there."""
    check_sglang(config)
    _check_launcher(config)
    if config.logger.wandb and importlib.util.find_spec("wandb") is None:
        raise UserError("logger.wandb=true needs the package wandb: pip install wandb, or use logger=default.")


def _check_launcher(config: RunConfig) -> None:
    cluster, transport = config.cluster, config.resharding.transport
    if cluster.launcher == "local":
        if cluster.nodes > 1:
            raise UserError(
                f"cluster.nodes={cluster.nodes}, but launcher=local starts processes on one machine: add "
                "cluster.launcher=ray, or set cluster.nodes=1."
            )
        if transport == "object_store":
            raise UserError("resharding.transport=object_store is Ray's: add cluster=ray, or use transport=auto.")
        return
    if importlib.util.find_spec("ray") is None:
        raise UserError(
            "cluster.launcher=ray needs the package ray: pip install 'rlhfspec-mega[ray]', or use cluster=local."
        )
    if cluster.nodes > 1 and ray_address(cluster) is None:
        raise UserError(
            f"cluster.nodes={cluster.nodes} needs a running Ray cluster: `ray start --head` on one node, `ray start "
            "--address=HEAD:6379` on the others, then add cluster.address=auto."
        )
    if cluster.nodes > 1 and transport == "shared_memory":
        raise UserError("resharding.transport=shared_memory ends at one machine: use resharding.transport=auto.")


def _check_useless(config: RunConfig) -> None:
    """Options that were set and would change nothing: refused, so that no run is believed to be what it is not."""
    another = config.algorithm.advantage == "rloo" or _is_import_path(config.algorithm.advantage)
    if another and config.algorithm.normalize_by_std:
        raise UserError(
            f"algorithm.normalize_by_std=true has no effect with algorithm.advantage={config.algorithm.advantage}: use "
            "algorithm=rloo, or set it to false."
        )
    own_loss = config.algorithm.loss is not None
    plain_pipeline = config.actor.pipeline_parallel == 1
    built_in_data = config.data.kind == "chain_sums"
    idle = {
        "algorithm.clip_low": (own_loss, "algorithm.loss=null"),
        "algorithm.clip_high": (own_loss, "algorithm.loss=null"),
        "algorithm.importance_cap": (own_loss, "algorithm.loss=null"),
        "algorithm.overlong_penalty": (config.algorithm.overlong != "penalize", "algorithm.overlong=penalize"),
        "actor.optimizer.min_lr_ratio": (
            config.actor.optimizer.schedule == "constant",
            "actor.optimizer.schedule=cosine",
        ),
        "actor.virtual_pipeline": (plain_pipeline, "actor.pipeline_parallel=2"),
        "actor.overlap_p2p": (plain_pipeline, "actor.pipeline_parallel=2"),
        "actor.batch_p2p": (plain_pipeline, "actor.pipeline_parallel=2"),
        "data.train": (built_in_data, "data=files"),
        "data.eval": (built_in_data, "data=files"),
        "data.chat_template": (built_in_data, "data=files"),
        "algorithm.kl_in": (config.algorithm.kl_coef == 0, "algorithm.kl_coef=0.01"),
        "algorithm.kl_estimator": (config.algorithm.kl_coef == 0, "algorithm.kl_coef=0.01"),
        "placement.reference": (config.algorithm.kl_coef == 0, "algorithm.kl_coef=0.01"),
        "placement.reference_tensor_parallel": (reference_home(config) != GENERATION, "placement.reference=generation"),
        "data.max_terms": (not built_in_data, "data=chain_sums"),
        "data.median_terms": (not built_in_data, "data=chain_sums"),
        "data.sigma_terms": (not built_in_data, "data=chain_sums"),
        "data.max_operand": (not built_in_data, "data=chain_sums"),
        "data.max_sum": (not built_in_data, "data=chain_sums"),
        "trainer.eval_prompts": (not config.trainer.eval_every, "trainer.eval_every=20"),
        "cluster.address": (config.cluster.launcher == "local", "cluster.launcher=ray"),
        "logger.wandb_project": (not config.logger.wandb, "logger=wandb"),
        **idle_drafting(config),
        **idle_reallocation(config),
        **idle_sglang(config),
    }
    for key, (unused, remedy) in idle.items():
        value, default = attrgetter(key)(config), attrgetter(key)(RunConfig())
        if unused and value != default:
            raise UserError(
                f"{_setting(key, value)} has no effect here: add {remedy}, or set {_setting(key, default)}."
            )


def _setting(key: str, value: object) -> str:
    """An option as one writes it on the command line."""
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def _check_algorithm(config: RunConfig) -> None:
    trainer = config.trainer
    if trainer.samples_per_prompt < 2:
        raise UserError(
            f"trainer.samples_per_prompt={trainer.samples_per_prompt}, but {config.algorithm.advantage} compares the "
            "samples of a prompt with each other: use at least 2."
        )
    if config.rollout.temperature == 0:
        raise UserError(
            "rollout.temperature=0 makes all samples of a prompt equal, so nothing could be learnt: use e.g. 1.0."
        )
    if not config.reward.function:
        raise UserError("reward.function is empty: set reward.function=package.module.function.")
    if not _is_import_path(config.reward.function):
        raise UserError(f"reward.function={config.reward.function} is no import path: write package.module.function.")
    if config.algorithm.advantage not in ADVANTAGES and not _is_import_path(config.algorithm.advantage):
        raise unknown_choice("algorithm.advantage", config.algorithm.advantage, ADVANTAGES)
    if config.algorithm.loss is not None and not _is_import_path(config.algorithm.loss):
        raise UserError(f"algorithm.loss={config.algorithm.loss} is no import path: write package.module.function.")


def _is_import_path(value: str) -> bool:
    return re.fullmatch(r"\w+(\.\w+)+", value) is not None


def _check_data(config: RunConfig) -> None:
    data = config.data
    if data.kind == "chain_sums":
        ChainSums.from_config(data, config.seed)
        return
    if not data.train:
        raise UserError("data=files needs files to train on: add data.train=[FILE.jsonl].")
    if config.trainer.eval_every and not data.eval:
        raise UserError("data.eval is empty: add data.eval=[FILE.jsonl], or trainer.eval_every=0 for no evaluation.")
    for key, files in (("data.train", data.train), ("data.eval", data.eval)):
        for file in files:
            if not Path(file).is_file():
                raise UserError(f"{key} names {file}, which does not exist: put the file there or correct the path.")


def _check_shape(config: RunConfig, shape: ModelShape) -> None:
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
    """The actor's parallel sizes against the model's shape, and the silent traps of pipeline communication.

    Raises:
        UserError: a size that does not divide, or a combination that Megatron runs with wrong gradients.
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


def _check_lengths(config: RunConfig, shape: ModelShape) -> None:
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


def _check_devices(config: RunConfig) -> None:
    if device_type(config.cluster) == "cpu":
        return
    if config.cluster.launcher == "ray" and ray_address(config.cluster):
        return  # the GPUs are elsewhere: Ray is asked for them before any worker starts
    wanted, there = config.cluster.devices_per_node, len(gpu_memory())
    if there == 0:
        raise UserError("cluster.device=cuda, but torch finds no NVIDIA GPU on this machine: use cluster=local.")
    if wanted > there:
        plural = "s" if there > 1 else ""
        raise UserError(
            f"cluster.devices_per_node={wanted}, but this machine has {there} GPU{plural}: set "
            f"cluster.devices_per_node={there} and parallel sizes that fit, or cluster.device=cpu."
        )


def _check_memory(config: RunConfig, shape: ModelShape, sizes: Sizes) -> None:
    """Compare the estimate of planning.memory with what the machine has.

    On a CPU all workers share the machine's memory. On GPUs the device that holds most decides, while samples are
    generated or while the actor learns; a tenth is left to communication buffers and fragmentation.
    """
    actor, engine, draft = sizes.actor_memory, sizes.engine_memory, sizes.draft_memory
    parts = (
        f"per actor rank {actor.weights / GIB:,.1f} weights, {actor.gradients / GIB:,.1f} gradients, "
        f"{actor.optimizer / GIB:,.1f} optimizer, {(actor.activations + actor.logits) / GIB:,.1f} activations; "
        f"per engine {(engine.weights + engine.packed) / GIB:,.1f} weights, {engine.kv / GIB:,.1f} KV, "
        f"{engine.scores / GIB:,.1f} scores"
    )
    if draft.engine:
        of_draft = f"{draft.actor / GIB:,.1f} on one actor rank, {draft.engine / GIB:,.1f} on each engine"
        parts += f"; for the draft {of_draft}"
    if sizes.reference_memory:
        parts += f"; for each rank of the reference {sizes.reference_memory / GIB:,.1f}"
    placement, of_engine = sizes.placement, engine.total + draft.engine
    if device_type(config.cluster) == "cpu":
        workers = sum(map(len, placement.processes().values()))
        need = sizes.actor_ranks * (actor.total + actor.weights) + sizes.engines * of_engine
        need += len(placement.devices(REFERENCE)) * sizes.reference_memory
        need += draft.actor + workers * PROCESS_BYTES + (sizes.engines * ENGINE_BYTES if uses_sglang(config) else 0)
        need, have = need // config.cluster.nodes, host_memory()
        where, hint = "this machine", "choose a smaller model or a machine with GPUs"
    elif not gpu_memory():
        return  # the GPUs of a Ray cluster, seen from a machine without
    else:
        of_actor = actor.total + draft.actor
        beside = of_actor  # an engine
        if uses_sglang(config):
            of_engine = int((memory_share(config, placement) or 0.0) * min(gpu_memory()))
            beside -= (actor.activations + actor.logits) if engines_sleep(config, placement) else 0
        generating = {ACTOR: beside, ENGINE: of_engine, REFERENCE: sizes.reference_memory}
        need = max(placement.fullest({ACTOR: of_actor}), placement.fullest(generating))
        have = int(0.9 * min(gpu_memory()))
        where = "each GPU"
        hint = "raise actor.tensor_parallel or pipeline_parallel, set actor.recompute=true, or lower rollout.slots"
        hint += ", or set drafting.refresh_every=0" if draft.actor else ""
    if need > have:
        raise UserError(
            f"Model {config.model.path or config.model.name} with {shape.parameters / 1e9:,.1f} billion weights needs "
            f"about {need / GIB:,.0f} GiB on {where} and {have / GIB:,.0f} GiB can be used ({parts}): {hint}."
        )


def _check_weights_exist(config: RunConfig) -> None:
    """Models made here are tiny and small; a shape with published weights needs them on disk."""
    model = config.model
    if model.path is None and model.hub_name is not None:
        raise UserError(
            f"model={model.name} names a shape only: download {model.hub_name} (hf download {model.hub_name} "
            "--local-dir DIR) and add model.path=DIR."
        )
