"""A Ray cluster of two nodes on this machine, made by Ray's own test cluster; it listens on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

import pytest
from ray.cluster_utils import Cluster


@contextmanager
def two_nodes(cpus: int) -> Iterator[str]:
    """Address of a cluster whose nodes have so many CPUs each."""
    node = {"num_cpus": cpus, "num_gpus": 0, "node_ip_address": "127.0.0.1", "object_store_memory": 2**28}
    with TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", directory)  # short: Ray makes sockets in it
        patch.setenv("RAY_worker_niceness", "0")  # as slurm/settings.sh has it
        cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        try:
            cluster.add_node(**node)
            yield cluster.address
        finally:
            cluster.shutdown()
