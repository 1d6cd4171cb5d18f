"""What every device of a run holds: ranks of which models, and their bytes in each phase of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlhfspec_mega.config.fusion import fuses
from rlhfspec_mega.config.hardware import device_memory
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.sglang import engines_sleep, memory_share, uses_sglang
from rlhfspec_mega.config.sizes import Sizes, actor_plan, memory_plan_of_critic
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.memory import ActorMemory, stage_memory
from rlhfspec_mega.planning.placement import ACTOR, CRITIC, ENGINE

GENERATE, SCORE, TRAIN = "generate", "score", "train"  # generation; frozen models on the actor's ranks; updates
PHASES = (GENERATE, SCORE, TRAIN)
DRAFT = "draft"  # learns on one actor rank; what engines need for it counts as theirs
USABLE = 0.9  # of a GPU's memory; the rest is for communication buffers and fragmentation
SGLANG_SHARE = 0.88  # assumed for an engine alone on its GPU, where SGLang itself chooses


@dataclass(frozen=True)
class DevicePlan:
    """One device.

    Attributes:
        node, index: the node, and the device's number within it.
        ranks: rank by model.
        bytes: by phase and model.
        capacity: bytes of its memory; 0 if unknown.
    """

    node: int
    index: int
    ranks: Mapping[str, int]
    bytes: Mapping[str, Mapping[str, int]]
    capacity: int

    def total(self, phase: str) -> int:
        return sum(self.bytes[phase].values())

    @property
    def fullest_phase(self) -> str:
        return max(self.bytes, key=self.total)

    @property
    def most(self) -> int:
        """Bytes in the phase that needs most."""
        return self.total(self.fullest_phase)


def device_plans(config: RunConfig, shape: ModelShape, sizes: Sizes) -> list[DevicePlan]:
    """All devices of the cluster, node by node.

    The actor's weights, gradients and optimizer stay on its devices; its activations are there while it trains. An
    SGLang engine has a fixed share of the memory, and none while the actor trains if it sleeps then; the torch
    engine keeps what it has. Frozen models' weights rest in host memory and come for the time of a call.
    """
    each = config.cluster.devices_per_node
    ranks: list[dict[str, int]] = [{} for _ in range(sizes.devices)]
    for model, place in sizes.placement.places.items():
        for rank, devices in enumerate(place.devices):
            for device in devices:
                ranks[device][model] = rank
    capacity = device_memory(config.cluster)
    stages, critic = actor_stages(config, shape, sizes), critic_stages(config, sizes)
    plans = []
    for device, held in enumerate(ranks):
        stage = _stage_of(held, ACTOR, stages, sizes)
        of_critic = _stage_of(held, CRITIC, critic, sizes, config.actor.pipeline_parallel if fuses(config) else 0)
        loads = {phase: _loads(config, sizes, held, stage, of_critic, phase, capacity) for phase in PHASES}
        plans.append(DevicePlan(device // each, device % each, held, loads, capacity))
    return plans


def actor_stages(config: RunConfig, shape: ModelShape, sizes: Sizes) -> list[ActorMemory]:
    """Bytes of an actor rank of each pipeline stage."""
    plan = actor_plan(config, sizes.data_parallel)
    return [stage_memory(shape, plan, stage) for stage in range(plan.layout.pipeline)]


def critic_stages(config: RunConfig, sizes: Sizes) -> list[ActorMemory]:
    """Bytes of a critic's rank of each pipeline stage; [] without a critic."""
    if sizes.critic is None:
        return []
    plan = memory_plan_of_critic(config, sizes.critic)
    return [stage_memory(sizes.critic.shape, plan, stage) for stage in range(plan.layout.pipeline)]


def _stage_of(
    held: Mapping[str, int], model: str, stages: list[ActorMemory], sizes: Sizes, opposed_to: int = 0
) -> ActorMemory | None:
    """The memory of the pipeline stage that a device's rank of this model has; see ParallelSizes.opposed_to."""
    if model not in held:
        return None
    if opposed_to:
        return stages[-1 - held[model] * opposed_to // sizes.actor_ranks % len(stages)]
    return stages[held[model] * len(stages) // sizes.actor_ranks]


def fullest_device(plans: list[DevicePlan]) -> DevicePlan:
    """The device that needs the most memory in any phase."""
    return max(plans, key=lambda plan: plan.most)


def _loads(
    config: RunConfig,
    sizes: Sizes,
    held: Mapping[str, int],
    stage: ActorMemory | None,
    of_critic: ActorMemory | None,
    phase: str,
    capacity: int,
) -> dict[str, int]:
    """Bytes by model of a device that holds these ranks."""
    loads = {}
    if stage is not None:
        loads[ACTOR] = stage.total - (0 if phase == TRAIN else stage.activations)
    if stage is not None and of_critic is not None:
        # Both learn in one pass, or one learns after the other, and the larger activations count.
        most = of_critic.activations if fuses(config) else max(of_critic.activations - stage.activations, 0)
        more = most if phase == TRAIN else 0
        loads[CRITIC] = of_critic.total - of_critic.activations + more
    if sizes.draft_memory.actor and held.get(ACTOR) == _draft_rank(config, sizes):
        loads[DRAFT] = sizes.draft_memory.actor
    if ENGINE in held and (phase == GENERATE or not engines_sleep(config, sizes.placement)):
        loads[ENGINE] = _engine_bytes(config, sizes, capacity)
    for model, memory in sizes.frozen_memory.items():
        within_actor = sizes.placement.places[model].within == ACTOR
        if model in held and phase == (SCORE if within_actor else GENERATE):
            loads[model] = memory
    return loads


def _engine_bytes(config: RunConfig, sizes: Sizes, capacity: int) -> int:
    if uses_sglang(config) and capacity:
        return int((memory_share(config, sizes.placement) or SGLANG_SHARE) * capacity)
    return sizes.engine_memory.total + sizes.draft_memory.engine


def _draft_rank(config: RunConfig, sizes: Sizes) -> int:
    """The rank that holds the draft: the first of the last pipeline stage."""
    return sizes.actor_ranks // config.actor.pipeline_parallel * (config.actor.pipeline_parallel - 1)
