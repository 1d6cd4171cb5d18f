"""The frozen models on generation devices: the processes of their replicas, beside those of the engines."""

from __future__ import annotations

from collections.abc import Sequence

from rlhfspec_mega.cluster.interface import Cluster, WorkerSpec
from rlhfspec_mega.cluster.meeting_point import MeetingPoint
from rlhfspec_mega.ledger.ledger import Ledger
from rlhfspec_mega.megatron.description import ModelDescription, ParallelSizes
from rlhfspec_mega.megatron.rendezvous import Rendezvous
from rlhfspec_mega.planning.placement import ENGINE
from rlhfspec_mega.rollout.scoring import Encode, Scoring
from rlhfspec_mega.system.frozen import frozen_descriptions
from rlhfspec_mega.system.setup import MEGATRON_WORKER, Setup
from rlhfspec_mega.workers.scorer_group import ScorerGroup


class Scorers:
    """Replicas of the frozen models, started and ended with the run; a replica that loses a process is restarted.

    Args:
        cluster: `wait_started` must be called after construction.

    Attributes:
        models: names of the frozen models.
    """

    def __init__(self, setup: Setup, cluster: Cluster) -> None:
        self._config = setup.config
        role, tensor = setup.placement.scorer, setup.config.placement.reference_tensor_parallel
        assert role is not None
        devices = setup.placement.devices(role)
        self._meeting_point = MeetingPoint(cluster.host_address, setup.config.launcher.call_timeout)
        descriptions = frozen_descriptions(setup, ParallelSizes(tensor=tensor))
        self.models = [one.name for one in descriptions]
        specs = self._specs(setup, descriptions, devices, tensor)
        workers = cluster.launch(role, specs, replaceable=True, needs_weights=False, together=tensor)
        engines = {
            replica: engines_on(setup.placement.devices(ENGINE), devices[first : first + tensor])
            for replica, first in enumerate(range(0, len(devices), tensor))
        }
        self._group = ScorerGroup(cluster, workers, descriptions, engines, setup.batching)

    def new_scoring(self, ledger: Ledger, models: Sequence[str], encode: Encode | None) -> Scoring:
        """Scoring of one rollout, whose samples the ledger holds, by some of the models; see Scoring."""
        most = self._config.trainer.max_tokens_per_microbatch
        return Scoring(self._group, most, ledger, models, encode)

    def close(self) -> None:
        """Stop listening; called after the processes have ended."""
        self._meeting_point.close()

    def _specs(
        self, setup: Setup, descriptions: list[ModelDescription], devices: list[tuple[int, ...]], tensor: int
    ) -> list[WorkerSpec]:
        shared = {"models": descriptions, "device": setup.device, "seed": setup.config.seed}
        specs = []
        for rank, of_rank in enumerate(devices):
            replica, peer = divmod(rank, tensor)
            address = f"{self._meeting_point.address}.{replica}"
            rendezvous = Rendezvous(address, peer, tensor, setup.config.launcher.call_timeout)
            specs.append(WorkerSpec(MEGATRON_WORKER, {**shared, "rendezvous": rendezvous}, of_rank, numbered=True))
        return specs


def engines_on(engines: list[tuple[int, ...]], devices: list[tuple[int, ...]]) -> set[int]:
    """Ranks of the engines that use one of these devices."""
    wanted = {device for of_rank in devices for device in of_rank}
    return {rank for rank, held in enumerate(engines) if wanted.intersection(held)}
