"""The frozen reference on generation devices: the processes of its replicas, beside those of the engines."""

from __future__ import annotations

from rlhfspec_mega.cluster.interface import Cluster, WorkerSpec
from rlhfspec_mega.cluster.meeting_point import MeetingPoint
from rlhfspec_mega.ledger.ledger import Ledger
from rlhfspec_mega.megatron.description import ParallelSizes, describe
from rlhfspec_mega.megatron.rendezvous import Rendezvous
from rlhfspec_mega.planning.placement import ENGINE, REFERENCE
from rlhfspec_mega.rollout.scoring import Scoring
from rlhfspec_mega.system.setup import MEGATRON_WORKER, Setup
from rlhfspec_mega.workers.scorer_group import ScorerGroup


class Scorers:
    """Replicas of the reference, started and ended with the run; a replica that loses a process is restarted.

    Args:
        cluster: `wait_started` must be called after construction.
    """

    def __init__(self, setup: Setup, cluster: Cluster) -> None:
        self._config = setup.config
        config, devices = setup.config, setup.placement.devices(REFERENCE)
        tensor = config.placement.reference_tensor_parallel
        self._meeting_point = MeetingPoint(cluster.host_address, config.launcher.call_timeout)
        description = describe(
            REFERENCE,
            setup.shape,
            config.actor,
            ParallelSizes(tensor=tensor),
            temperature=config.rollout.temperature,
            checkpoint=setup.reference,
            rests=setup.placement.places[REFERENCE].rests,
        )
        shared = {"models": [description], "device": setup.device, "seed": config.seed}
        specs = []
        for rank, of_rank in enumerate(devices):
            replica, peer = divmod(rank, tensor)
            address = f"{self._meeting_point.address}.{replica}"
            rendezvous = Rendezvous(address, peer, tensor, config.launcher.call_timeout)
            arguments = {**shared, "rendezvous": rendezvous}
            specs.append(WorkerSpec(MEGATRON_WORKER, arguments, of_rank, numbered=True))
        workers = cluster.launch(REFERENCE, specs, replaceable=True, needs_weights=False, together=tensor)
        engines = {
            replica: engines_on(setup.placement.devices(ENGINE), devices[first : first + tensor])
            for replica, first in enumerate(range(0, len(devices), tensor))
        }
        most = config.trainer.max_tokens_per_microbatch
        self._group = ScorerGroup(cluster, workers, description, engines, most)

    def new_scoring(self, ledger: Ledger) -> Scoring:
        """Scoring of one rollout, whose samples the ledger holds."""
        return Scoring(self._group, self._config.trainer.max_tokens_per_microbatch, ledger)

    def close(self) -> None:
        """Stop listening; called after the processes have ended."""
        self._meeting_point.close()


def engines_on(engines: list[tuple[int, ...]], devices: list[tuple[int, ...]]) -> set[int]:
    """Ranks of the engines that use one of these devices."""
    wanted = {device for of_rank in devices for device in of_rank}
    return {rank for rank, held in enumerate(engines) if wanted.intersection(held)}
