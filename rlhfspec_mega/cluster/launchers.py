"""Chooses the launcher and the weight transport of a run; libraries of the others are not imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhfspec_mega.cluster.local import LocalCluster
from rlhfspec_mega.cluster.local import import_ahead as import_locally
from rlhfspec_mega.cluster.supervised import SupervisedCluster
from rlhfspec_mega.config.reach import ray_address
from rlhfspec_mega.config.schema.system import ClusterConfig, LauncherConfig
from rlhfspec_mega.resharding.collective import CollectiveHost
from rlhfspec_mega.resharding.shared_memory import SharedMemoryHost
from rlhfspec_mega.resharding.transport import Host, OpenHost


def make_cluster(
    cluster: ClusterConfig,
    launcher: LauncherConfig,
    log_dir: Path,
    places: Mapping[str, Sequence[tuple[int, ...]]],
    *,
    use_gpus: bool,
    training_devices: int | None,
) -> SupervisedCluster:
    """The cluster of a run, by its launcher.

    Args:
        places: device indices of every rank of every role (planning.placement).
        training_devices: how many of them lie on nodes for training; None: nodes are alike.

    Raises:
        UserError: Ray is not installed, its cluster cannot be reached, or it has too few devices.
    """
    limits = {
        "call_timeout": launcher.call_timeout,
        "start_timeout": launcher.start_timeout,
        "heartbeat_timeout": launcher.heartbeat_timeout,
        "max_restarts": launcher.max_restarts,
    }
    if launcher.kind == "local":
        return LocalCluster(log_dir, threads=cluster.threads_per_worker, use_gpus=use_gpus, **limits)
    from rlhfspec_mega.cluster.ray_launcher import RayCluster

    return RayCluster(
        log_dir,
        threads=cluster.threads_per_worker,
        use_gpus=use_gpus,
        places=places,
        address=ray_address(launcher),
        training_devices=training_devices,
        **limits,
    )


def import_ahead(cluster: ClusterConfig, launcher: LauncherConfig, modules: Sequence[str], *, use_gpus: bool) -> None:
    """Begin to import the code of workers, where a launcher can and no worker has a GPU."""
    if launcher.kind == "local" and not use_gpus:
        import_locally(modules, cluster.threads_per_worker)


def transport(name: str, cluster: SupervisedCluster, call_timeout: float) -> OpenHost:
    """The function that opens a transport of this name (resharding.transport) on this cluster."""

    def open_host(owners: int, receivers: int, slot_bytes: int, device: str) -> Host:
        if name == "shared_memory":
            return SharedMemoryHost(slot_bytes, receivers, call_timeout)
        if name == "collective":
            return CollectiveHost(cluster.host_address, owners, receivers, slot_bytes, call_timeout, device)
        from rlhfspec_mega.cluster.ray_transport import ObjectStoreHost

        return ObjectStoreHost(receivers, call_timeout)

    return open_host
