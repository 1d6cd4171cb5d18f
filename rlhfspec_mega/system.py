"""All processes of one run, started together, and the few things the algorithm asks of them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import TracebackType
from uuid import uuid4

from rlhfspec_mega.actor.rendezvous import Rendezvous
from rlhfspec_mega.cluster.interface import WorkerSpec
from rlhfspec_mega.cluster.local import LocalCluster
from rlhfspec_mega.config.hardware import device_type
from rlhfspec_mega.config.schema import RunConfig
from rlhfspec_mega.config.sizes import Sizes
from rlhfspec_mega.models.hf_directory import write_directory
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.placement import ACTOR, ENGINE, place
from rlhfspec_mega.resharding.controller import Resharder
from rlhfspec_mega.rollout.manager import RolloutManager
from rlhfspec_mega.workers.actor_group import ActorGroup


class System:
    """Actor ranks and engines with resharding between them. A context manager: leaving it ends every process.

    Args:
        run_dir: worker logs go to its `logs`.
        total_updates: optimizer steps to come, for the learning-rate schedule.
        with_engines: a replay of saved rollouts needs none.

    Attributes:
        actor: log-probs, updates, checkpoints.
        rollout: generation; only with engines.
        policy_version: of the weights the engines hold.
    """

    actor: ActorGroup
    rollout: RolloutManager

    def __init__(
        self,
        config: RunConfig,
        sizes: Sizes,
        shape: ModelShape,
        run_dir: Path,
        *,
        total_updates: int,
        with_engines: bool = True,
    ) -> None:
        self._config, self._sizes, self._shape = config, sizes, shape
        self._total_updates, self._with_engines = total_updates, with_engines
        self._device = device_type(config.cluster)
        self._places = place(config.placement.mode, sizes.devices, sizes.actor_ranks, sizes.engines)
        self._cluster = LocalCluster(
            run_dir / "logs",
            threads=config.cluster.threads_per_worker,
            deadline_seconds=config.cluster.deadline_seconds,
            start_seconds=config.cluster.start_seconds,
            use_gpus=self._device == "cuda",
        )
        self._temporary = tempfile.TemporaryDirectory(prefix="rlhfspec_mega.")
        self._resharder: Resharder | None = None
        self.policy_version = -1

    def __enter__(self) -> System:
        try:
            self._start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _start(self) -> None:
        config = self._config
        actor = self._cluster.launch(ACTOR, self._actor_specs())
        engines = self._cluster.launch(ENGINE, self._engine_specs()) if self._with_engines else None
        self._cluster.wait_started()
        self.actor = ActorGroup(actor, config.actor, config.trainer.max_tokens_per_microbatch)
        self._resharder = Resharder(
            self._cluster,
            actor,
            mapping_for(self._shape.architecture).hf_tensors(self._shape, config.actor.dtype),
            transport=config.resharding.transport,
            bucket_bytes=int(config.resharding.bucket_mib * 2**20),
            deadline_seconds=config.cluster.deadline_seconds,
            device=self._device if config.placement.mode == "separate" else "cpu",
        )
        if engines is not None:
            self._engines = engines
            self._resharder.connect(engines)
            self.rollout = RolloutManager(engines, self._cluster.wait, config.rollout.poll_seconds)

    def _actor_specs(self) -> list[WorkerSpec]:
        meeting_point = f"file://{self._temporary.name}/actor-{uuid4().hex}"
        return [
            WorkerSpec(
                "rlhfspec_mega.workers.actor.ActorWorker",
                {
                    "shape": self._shape,
                    "config": self._config.actor,
                    "rendezvous": Rendezvous(
                        meeting_point, rank, self._sizes.actor_ranks, self._config.cluster.deadline_seconds
                    ),
                    "device": self._device,
                    "seed": self._config.seed,
                    "temperature": self._config.rollout.temperature,
                    "total_updates": self._total_updates,
                },
                devices=(device,),
            )
            for rank, device in enumerate(self._places[ACTOR])
        ]

    def _engine_specs(self) -> list[WorkerSpec]:
        arguments = {
            "shape": self._shape,
            "config": self._config.rollout,
            "dtype": self._config.rollout.dtype or self._config.actor.dtype,
            "device": self._device,
        }
        return [
            WorkerSpec("rlhfspec_mega.workers.engine.TorchEngineWorker", arguments, devices=(device,))
            for device in self._places[ENGINE]
        ]

    def reshard(self, version: int) -> None:
        """Give every engine the actor's weights as policy `version`."""
        assert self._resharder is not None
        self._resharder.update(self._engines, version)
        self.policy_version = version

    def export(self, path: Path, source: Path) -> None:
        """Write the actor's weights as a Hugging Face directory, with the tokenizer of `source`."""
        assert self._resharder is not None
        write_directory(path, self._shape, self._resharder.stream(), source)

    def _close(self) -> None:
        self._cluster.close()
        if self._resharder is not None:
            self._resharder.close()
        self._temporary.cleanup()
