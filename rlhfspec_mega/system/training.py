"""The training side: Megatron ranks with their models, the draft beside the actor, and the resharding of both."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from rlhfspec_mega.cluster.interface import Cluster, WorkerSpec
from rlhfspec_mega.cluster.meeting_point import MeetingPoint
from rlhfspec_mega.config.frozen import runs_engines
from rlhfspec_mega.config.fusion import fuses
from rlhfspec_mega.draft.directory import read_draft_tensors
from rlhfspec_mega.draft.refresh import DraftLearning
from rlhfspec_mega.megatron.description import Learning, ModelDescription, ParallelSizes, describe
from rlhfspec_mega.megatron.rendezvous import Rendezvous
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.planning.placement import ACTOR, CRITIC, ENGINE
from rlhfspec_mega.resharding.controller import Resharder
from rlhfspec_mega.resharding.transport import OpenHost
from rlhfspec_mega.system.frozen import frozen_descriptions
from rlhfspec_mega.system.fusion import fusion_planner
from rlhfspec_mega.system.setup import MEGATRON_WORKER, Setup
from rlhfspec_mega.types import WeightTarget
from rlhfspec_mega.workers.draft import DraftGroup
from rlhfspec_mega.workers.fused_group import FusedGroup
from rlhfspec_mega.workers.model_group import ModelGroup


class Training:
    """One start of the training ranks; after a rank has died, a new object is built.

    Args:
        host: address at which workers reach this process.
        open_host: opens the transport of weights.

    Attributes:
        setup: what it was built from.
        models: by name; weights are not loaded yet.
        fused: actor and critic, if both can train in one pass; else None.
        draft: the draft beside the actor; None without drafting.
        resharder: resharding of the actor's weights and the draft's.
    """

    def __init__(self, setup: Setup, cluster: Cluster, host: str, open_host: OpenHost) -> None:
        self.setup, config = setup, setup.config
        self._meeting_point = MeetingPoint(host, config.launcher.call_timeout)
        descriptions = self._descriptions()
        workers = cluster.launch(ACTOR, self._specs(descriptions))
        cluster.wait_started()
        self.models = {one.name: ModelGroup(workers, one, setup.batching) for one in descriptions}
        self.fused: FusedGroup | None = None
        if fuses(config):
            actor, critic = self.models[ACTOR], self.models[CRITIC]
            self.fused = FusedGroup(
                workers, actor, critic, fusion_planner(config, actor.description, critic.description)
            )
        self.resharder = Resharder(
            cluster,
            self.actor,
            mapping_for(setup.shape.architecture).hf_tensors(setup.shape, config.actor.dtype),
            open_host=open_host,
            bucket_bytes=int(config.resharding.bucket_mib * 2**20),
            device="cpu" if setup.placement.share_device(ACTOR, ENGINE) else setup.device,
        )
        self.draft: DraftGroup | None = None
        if setup.draft is not None:
            learning = self._draft_learning() if config.speculation.refresh_every else None
            self.draft = DraftGroup(workers, self.actor, setup.draft, learning)
            tensors = read_draft_tensors(setup.draft, setup.shape)
            self.resharder.plan(WeightTarget.DRAFT, [replace(tensor, dtype=setup.engine_dtype) for tensor in tensors])

    @property
    def actor(self) -> ModelGroup:
        """The policy model."""
        return self.models[ACTOR]

    def load_start_weights(self) -> None:
        """Load the weights that the models which learn begin with."""
        assert self.setup.model is not None
        self.actor.load_weights(self.setup.model)
        if CRITIC in self.models:
            self.models[CRITIC].load_weights(Path(self.setup.config.critic.path or self.setup.model))

    def close(self) -> None:
        """Close connections; worker processes end with the cluster."""
        self.resharder.close()
        self._meeting_point.close()

    def _descriptions(self) -> list[ModelDescription]:
        """Descriptions of the actor and, on its ranks, of the critic and frozen models, if they are there."""
        setup, config = self.setup, self.setup.config
        made = partial(
            describe,
            shape=setup.shape,
            config=config.actor,
            parallel=ParallelSizes.of_actor(config.actor, setup.sizes.actor_ranks),
            temperature=config.rollout.temperature if runs_engines(config) else 1.0,
        )
        alone = config.critic.warmup_steps * setup.sizes.updates_per_step if CRITIC in setup.placement.places else 0
        found = [made(ACTOR, learning=Learning(config.actor.optimizer, setup.total_updates - alone))]
        critic = setup.sizes.critic
        if critic is not None:
            layout = critic.layout
            found.append(
                describe(
                    CRITIC,
                    critic.shape,
                    config.actor,
                    ParallelSizes(
                        layout.tensor,
                        layout.pipeline,
                        layout.data,
                        sequence=critic.sequence_parallel,
                        opposed_to=config.actor.pipeline_parallel if fuses(config) else 0,
                    ),
                    temperature=1.0,  # values do not depend on how tokens are sampled
                    learning=Learning(config.critic.optimizer, setup.total_updates),
                )
            )
        if setup.placement.scorer is None:
            found += frozen_descriptions(setup, found[0].parallel)
        return found

    def _specs(self, descriptions: list[ModelDescription]) -> list[WorkerSpec]:
        config, ranks = self.setup.config, self.setup.sizes.actor_ranks
        shared = {
            "models": descriptions,
            "device": self.setup.device,
            "seed": config.seed,
            "deterministic": config.trainer.deterministic,
        }
        meet = partial(Rendezvous, self._meeting_point.address)
        return [
            WorkerSpec(
                MEGATRON_WORKER,
                {**shared, "rendezvous": meet(rank, ranks, config.launcher.call_timeout)},
                devices,
            )
            for rank, devices in enumerate(self.setup.placement.devices(ACTOR))
        ]

    def _draft_learning(self) -> DraftLearning:
        config = self.setup.config
        return DraftLearning(
            buffer_tokens=config.speculation.buffer_tokens,
            learning_rate=config.speculation.refresh_lr,
            temperature=config.rollout.temperature,
            seed=config.seed,
            recent_only=config.trainer.deterministic,
        )
