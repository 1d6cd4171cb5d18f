"""Chooses the launcher and the transport of a run; libraries of those not chosen are not imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhfspec_mega.cluster.local import LocalCluster
from rlhfspec_mega.cluster.supervised import SupervisedCluster
from rlhfspec_mega.config.reach import ray_address
from rlhfspec_mega.config.schema import ClusterConfig
from rlhfspec_mega.resharding.collective import CollectiveHost
from rlhfspec_mega.resharding.shared_memory import SharedMemoryHost
from rlhfspec_mega.resharding.transport import Host, OpenHost


def make_cluster(
    config: ClusterConfig, log_dir: Path, places: Mapping[str, Sequence[tuple[int, ...]]], *, use_gpus: bool
) -> SupervisedCluster:
    """The cluster of `config.launcher`.

    Args:
        places: device indices of every rank of every role (planning.placement.place).

    Raises:
        UserError: Ray is not installed, its cluster cannot be reached or has too little.
    """
    limits = {
        "deadline_seconds": config.deadline_seconds,
        "start_seconds": config.start_seconds,
        "silence_seconds": config.silence_seconds,
        "max_restarts": config.max_restarts,
    }
    if config.launcher == "local":
        return LocalCluster(log_dir, threads=config.threads_per_worker, use_gpus=use_gpus, **limits)
    from rlhfspec_mega.cluster.ray_launcher import RayCluster

    return RayCluster(
        log_dir,
        threads=config.threads_per_worker,
        use_gpus=use_gpus,
        places=places,
        address=ray_address(config),
        **limits,
    )


def transport(name: str, cluster: SupervisedCluster, deadline_seconds: float) -> OpenHost:
    """What opens a transport of this name (resharding.transport) on this cluster."""

    def open_host(owners: int, receivers: int, slot_bytes: int, device: str) -> Host:
        if name == "shared_memory":
            return SharedMemoryHost(slot_bytes, receivers, deadline_seconds)
        if name == "collective":
            return CollectiveHost(cluster.host_address, owners, receivers, slot_bytes, deadline_seconds, device)
        from rlhfspec_mega.cluster.ray_transport import ObjectStoreHost

        return ObjectStoreHost(receivers, deadline_seconds)

    return open_host
