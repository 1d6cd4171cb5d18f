"""Sizes derived from the configuration: ranks, engines, updates per step, weights per rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlhfspec_mega.config.critic import CriticPlan, critic_plan, has_critic
from rlhfspec_mega.config.frozen import frozen_home, frozen_models, runs_engines
from rlhfspec_mega.config.hardware import device_type
from rlhfspec_mega.config.model_shape import model_shape
from rlhfspec_mega.config.reward_model import reward_shape
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.sglang import engine_gpus
from rlhfspec_mega.config.speculation import memory_of_draft
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.megatron_tensors import ParallelLayout, parameters_per_rank
from rlhfspec_mega.planning.memory import (
    GIB,
    ActorMemory,
    ActorPlan,
    DraftMemory,
    EngineMemory,
    ReferencePlan,
    actor_memory,
    engine_memory,
    reference_memory,
)
from rlhfspec_mega.planning.placement import (
    ACTOR,
    ENGINE,
    GENERATION,
    PLACEMENTS,
    REFERENCE,
    REWARD,
    Placement,
    PlacementRequest,
)


@dataclass(frozen=True)
class Sizes:
    """Everything that is derived once, before anything starts.

    Attributes:
        max_sequence: tokens of the longest prompt and response together.
        samples_per_rank: most samples of one update on one data-parallel rank; packing balances ranks by tokens.
        total_updates: optimizer steps of the whole run.
        weights_per_rank: number of weights on the actor rank that holds most.
        placement: devices of every model.
        reward_shape: shape of the reward model; None without one.
        frozen_memory: bytes of a rank of each frozen model, by name.
        critic: shape and layout of the critic; None without one.
    """

    devices: int
    placement: Placement
    data_parallel: int
    actor_ranks: int
    engines: int
    samples_per_step: int
    samples_per_update: int
    updates_per_step: int
    samples_per_rank: int
    total_updates: int
    max_sequence: int
    parameters: int
    weights_per_rank: int
    actor_memory: ActorMemory
    engine_memory: EngineMemory
    draft_memory: DraftMemory
    reward_shape: ModelShape | None
    frozen_memory: Mapping[str, int]
    critic: CriticPlan | None


def shape_and_sizes(config: RunConfig) -> tuple[ModelShape, Sizes]:
    """The shape of the run's model and the run's sizes. Raises UserError as `model_shape` and `derive_sizes`."""
    shape = trained_shape(config)
    return shape, derive_sizes(config, shape)


def trained_shape(config: RunConfig) -> ModelShape:
    """The shape of the model that the run trains: model.path's, with a value head for a reward model.

    Raises UserError as `model_shape`, or if a language model is to be trained and model.path holds a classifier.
    """
    shape = model_shape(config.model)
    if config.task == "reward_model":
        return shape.with_value_head()
    if shape.value_head:
        raise UserError(
            f"model.path={config.model.path} is a reward model, which writes no text: give a language model, and use "
            "this one as reward.model.path or critic.path."
        )
    return shape


def derive_sizes(config: RunConfig, shape: ModelShape) -> Sizes:
    """Derive all sizes of a run.

    Raises:
        UserError: too few devices for the parallel sizes, numbers of samples that do not divide, or a directory without
            a draft of this model.
    """
    actor, trainer, rollout = config.actor, config.trainer, config.rollout
    devices = config.cluster.nodes * config.cluster.devices_per_node
    placement = _placement(config, devices)
    actor_ranks = len(placement.devices(ACTOR))
    data_parallel = actor_ranks // (actor.tensor_parallel * actor.pipeline_parallel)
    samples = trainer.prompts_per_step * trainer.samples_per_prompt
    update = trainer.mini_batch_size or samples
    if not runs_engines(config):
        samples = update = config.supervised.batch_size * (2 if shape.value_head else 1)
    _check_divides(update, samples)
    of_reward = reward_shape(config)
    max_sequence = rollout.max_prompt_tokens + rollout.max_new_tokens
    return Sizes(
        devices=devices,
        placement=placement,
        data_parallel=data_parallel,
        actor_ranks=actor_ranks,
        engines=len(placement.devices(ENGINE)),
        samples_per_step=samples,
        samples_per_update=update,
        updates_per_step=samples // update * config.algorithm.ppo_epochs,
        samples_per_rank=-(-update // data_parallel),
        total_updates=trainer.steps * (samples // update) * config.algorithm.ppo_epochs,
        max_sequence=max_sequence,
        parameters=shape.parameters,
        weights_per_rank=max(parameters_per_rank(shape, actor_layout(config, data_parallel))),
        actor_memory=actor_memory(shape, actor_plan(config, data_parallel)),
        engine_memory=engine_memory(
            shape, rollout.max_running_requests, max_sequence, rollout.dtype or actor.dtype, device_type(config.cluster)
        ),
        draft_memory=memory_of_draft(config, shape, max_sequence),
        reward_shape=of_reward,
        frozen_memory={
            model: _frozen_memory(config, of_reward if of_reward and model == REWARD else shape)
            for model in frozen_models(config)
        },
        critic=critic_plan(config, shape, actor_ranks),
    )


def training_devices(config: RunConfig) -> int | None:
    """Devices of the nodes that only train; None if nodes are alike. Raises UserError if none is left to generate."""
    nodes = config.placement.training_nodes
    if nodes is None or config.placement.mode != "separate":
        return None
    if nodes >= config.cluster.nodes:
        raise UserError(
            f"placement.training_nodes={nodes} leaves none of cluster.nodes={config.cluster.nodes} to generate: "
            "lower it, or use placement=colocated."
        )
    return nodes * config.cluster.devices_per_node


def _placement(config: RunConfig, devices: int) -> Placement:
    """The placement by placement.mode; only this function reads that option."""
    actor = config.actor
    copy = actor.tensor_parallel * actor.pipeline_parallel
    if copy > devices:
        raise UserError(
            f"actor.tensor_parallel={actor.tensor_parallel} times pipeline_parallel={actor.pipeline_parallel} needs "
            f"{copy} devices and the cluster has {devices}: lower one of them or set cluster.devices_per_node={copy}."
        )
    request = PlacementRequest(
        devices,
        copy,
        actor.data_parallel,
        training_devices=training_devices(config),
        engines=config.rollout.engines,
        engine_devices=engine_gpus(config),
        devices_per_node=config.cluster.devices_per_node,
        frozen=frozen_models(config),
        frozen_home=frozen_home(config) or GENERATION,
        replica_of_frozen=config.placement.reference_tensor_parallel,
        critic=has_critic(config),
    )
    placement = PLACEMENTS[config.placement.mode](request)
    if runs_engines(config):
        return placement
    return Placement({ACTOR: placement.places[ACTOR]})


def _check_divides(update: int, samples: int) -> None:
    if samples % update:
        near = min((n for n in range(1, samples + 1) if samples % n == 0), key=lambda n: abs(n - update))
        raise UserError(
            f"trainer.mini_batch_size={update} does not divide the {samples} samples of a step "
            f"(prompts_per_step x samples_per_prompt): use e.g. {near}."
        )


def actor_layout(config: RunConfig, data_parallel: int) -> ParallelLayout:
    """How the actor is spread over its ranks."""
    actor = config.actor
    return ParallelLayout(actor.tensor_parallel, actor.pipeline_parallel, data_parallel, actor.virtual_pipeline)


def actor_plan(config: RunConfig, data_parallel: int) -> ActorPlan:
    """What determines the memory of an actor rank."""
    actor, rollout = config.actor, config.rollout
    return ActorPlan(
        layout=actor_layout(config, data_parallel),
        dtype=actor.dtype,
        sequence_parallel=actor.sequence_parallel,
        recompute=actor.recompute,
        microbatch_tokens=config.trainer.max_tokens_per_microbatch,
        max_sequence=rollout.max_prompt_tokens + rollout.max_new_tokens,
        logprob_chunk=actor.logprob_chunk,
        packed=config.trainer.sequence_packing,
    )


def _frozen_memory(config: RunConfig, shape: ModelShape) -> int:
    home, actor = frozen_home(config), config.actor
    sizes = (actor.tensor_parallel, actor.pipeline_parallel)
    if home == GENERATION:
        sizes = (config.placement.reference_tensor_parallel, 1)
    return reference_memory(
        shape, ReferencePlan(*sizes, actor.dtype, config.trainer.max_tokens_per_microbatch, actor.logprob_chunk)
    )


def memory_plan_of_critic(config: RunConfig, critic: CriticPlan) -> ActorPlan:
    """What determines the memory of a critic's rank."""
    actor = actor_plan(config, critic.layout.data)
    return replace(actor, layout=critic.layout, sequence_parallel=critic.sequence_parallel)


def size_rows(config: RunConfig, sizes: Sizes) -> list[tuple[str, str, str]]:
    """Rows (what, value, where it comes from) of the table printed at the start."""
    actor, trainer, rollout = config.actor, config.trainer, config.rollout
    parallel = f"tensor {actor.tensor_parallel} x pipeline {actor.pipeline_parallel} x data {sizes.data_parallel}"
    if actor.virtual_pipeline > 1:
        parallel += f", {actor.virtual_pipeline} chunks a stage"
    return [
        ("parameters", f"{sizes.parameters:,}", f"model {config.model.path or config.model.name}"),
        ("devices", f"{sizes.devices}", f"{config.cluster.nodes} node x {config.cluster.devices_per_node}"),
        ("actor ranks", f"{sizes.actor_ranks}", parallel),
        ("weights per rank", f"{sizes.weights_per_rank:,}", f"{actor.dtype}, fp32 gradients"),
        *(_rows_of_generation(config, sizes) if sizes.engines else []),
        ("samples per rank and update", f"{sizes.samples_per_rank}", f"over {sizes.data_parallel} data-parallel"),
        (
            "longest sequence",
            f"{sizes.max_sequence} tokens",
            f"prompt {rollout.max_prompt_tokens} + answer {rollout.max_new_tokens}",
        ),
        ("tokens per micro-batch", f"{trainer.max_tokens_per_microbatch}", "at most"),
        ("memory per actor rank", f"{sizes.actor_memory.total / GIB:.2f} GiB", "estimate"),
        *_draft_rows(sizes.draft_memory),
        *_frozen_rows(sizes),
        *_critic_rows(config, sizes.critic),
    ]


def _rows_of_generation(config: RunConfig, sizes: Sizes) -> list[tuple[str, str, str]]:
    trainer, rollout = config.trainer, config.rollout
    where = "beside the actor" if sizes.placement.share_device(ACTOR, ENGINE) else "on devices of their own"
    seats = sizes.engines * rollout.max_running_requests
    return [
        ("engines", f"{sizes.engines}", f"{rollout.engine}, {where}, {rollout.max_running_requests} slots each"),
        ("memory per engine", f"{sizes.engine_memory.total / GIB:.2f} GiB", "estimate: weights, KV, scores"),
        ("samples per step", f"{sizes.samples_per_step}", f"{trainer.prompts_per_step} x {trainer.samples_per_prompt}"),
        ("waves per step", f"{-(-sizes.samples_per_step // seats)}", f"{seats} decode at once"),
        ("updates per step", f"{sizes.updates_per_step}", f"{sizes.samples_per_update} samples each"),
        ("updates in all", f"{sizes.total_updates}", f"{trainer.steps} steps"),
    ]


def _draft_rows(memory: DraftMemory) -> list[tuple[str, str, str]]:
    if not memory.engine:
        return []
    value = f"{memory.actor / GIB:.2f} + {memory.engine / GIB:.2f} GiB"
    return [("memory of the draft", value, "estimate: beside one actor rank, in each engine")]


def _frozen_rows(sizes: Sizes) -> list[tuple[str, str, str]]:
    names, rows = {REFERENCE: "reference", REWARD: "reward model"}, []
    for model, memory in sizes.frozen_memory.items():
        place = sizes.placement.places[model]
        where = "on the actor's ranks" if place.within == ACTOR else "on the engines' devices"
        value = f"{memory / GIB:.2f} GiB"
        rows.append((f"memory of the {names[model]}", value, f"estimate: a rank of {len(place.devices)}, {where}"))
    return rows


def _critic_rows(config: RunConfig, critic: CriticPlan | None) -> list[tuple[str, str, str]]:
    if critic is None:
        return []
    layout = critic.layout
    memory = actor_memory(critic.shape, memory_plan_of_critic(config, critic)).total / GIB
    where = f"tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data}, on the actor's ranks"
    return [
        ("parameters of the critic", f"{critic.shape.parameters:,}", where),
        ("memory per critic rank", f"{memory:.2f} GiB", "estimate"),
    ]
