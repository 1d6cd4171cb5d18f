"""What Slurm has for a run: the job that this process is in, else a partition, as `sinfo` shows it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from rlhfspec_mega.config.hardware import device_type
from rlhfspec_mega.config.schema.system import ClusterConfig

_SECONDS = 10.0  # longest wait for sinfo
_FIELDS = "%P|%t|%D|%G"  # partition, state, number of nodes, generic resources
_COMPONENT = r"SLURM_JOB_NUM_NODES_HET_GROUP_\d+"  # of a heterogeneous job
# States of nodes in service, which may be powered down (~), about to be (%), powering up (#) or down (^), in
# maintenance ($), planned for a job (-) or about to reboot (@); not those that do not answer (*).
_IN_SERVICE = re.compile(r"(idle|mix|alloc|comp|resv|plnd)[~#%^@-]?")
_FREE = ("idle", "idle~")


@dataclass(frozen=True)
class SlurmNodes:
    """Nodes that a run could have.

    Attributes:
        where: "job 17" or "partition gpu".
        chosen: whether the user has named it, or is in it; else it is the default partition.
        nodes: of those in service.
        free: those that no job uses or waits for; in a job, all.
        gpus: of a node; the fewest where nodes differ; None: Slurm does not say.
    """

    where: str
    chosen: bool
    nodes: int
    free: int
    gpus: int | None


def slurm_nodes(environment: Mapping[str, str] = os.environ) -> SlurmNodes | None:
    """The job's nodes, else those of SBATCH_PARTITION, else of the default partition; None without Slurm.

    Partitions of which sinfo says nothing, or not in time, count as no Slurm.
    """
    if job := environment.get("SLURM_JOB_ID"):
        components = [int(text) for name, text in environment.items() if re.fullmatch(_COMPONENT, name)]
        count = sum(components) or int(environment.get("SLURM_JOB_NUM_NODES", "1"))
        gpus = environment.get("SLURM_GPUS_ON_NODE", "").rpartition(":")[2]
        return SlurmNodes(f"job {job}", True, count, count, int(gpus) if gpus else None)
    command = ["sinfo", "--noheader", f"--format={_FIELDS}"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return _partition(answer.stdout, environment.get("SBATCH_PARTITION"))


def _partition(table: str, names: str | None) -> SlurmNodes | None:
    """The named partition, or the default one, which sinfo marks with a star; of several, by commas, that with most."""
    rows = [line.split("|") for line in table.splitlines() if line.count("|") == 3]
    marked = [partition.rstrip("*") for partition, *_ in rows if partition.endswith("*")]
    wanted = names.split(",") if names else marked[:1]
    found = []
    for name in wanted:
        usable = [
            (state, int(count), gpus_of(resources))
            for partition, state, count, resources in rows
            if partition.rstrip("*") == name and _IN_SERVICE.fullmatch(state)
        ]
        nodes = sum(count for _, count, _ in usable)
        free = sum(count for state, count, _ in usable if state in _FREE)
        gpus = min((gpus for *_, gpus in usable), default=0)
        found.append(SlurmNodes(f"partition {name}", bool(names), nodes, free, gpus))
    return max(found, key=lambda one: one.nodes, default=None)


def gpus_of(resources: str) -> int:
    """GPUs of a node by sinfo's generic resources, such as "gpu:h100:8(S:0-1),nvme:1"."""
    return sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", resources))


def lacking(slurm: SlurmNodes, cluster: ClusterConfig) -> str:
    """What these nodes lack for the run, as a clause; "" if nothing."""
    if cluster.nodes > slurm.nodes:
        return f"{cluster.nodes} nodes are asked for and {slurm.nodes} are in service"
    if slurm.gpus is not None and device_type(cluster) == "cuda" and cluster.devices_per_node > slurm.gpus:
        return f"{cluster.devices_per_node} GPUs of a node are asked for and Slurm knows of {slurm.gpus}"
    return ""


def slurm_line(slurm: SlurmNodes, cluster: ClusterConfig) -> str:
    """A sentence on what Slurm has for the run."""
    lack = lacking(slurm, cluster)
    if lack and slurm.chosen:
        return f"Slurm's {slurm.where} cannot hold it: {lack}."
    if lack:
        return f"Slurm's {slurm.where}, the default one, cannot hold it: {lack}; set SBATCH_PARTITION to another."
    if slurm.where.startswith("job"):
        gpus = "" if slurm.gpus is None else f" with {slurm.gpus} GPUs each"
        return f"Slurm's {slurm.where} holds it: {_nodes(slurm.nodes)}{gpus}."
    free = f"{slurm.free} of the {_nodes(slurm.nodes)} in Slurm's {slurm.where} are free"
    if cluster.nodes > slurm.free:
        return f"{free}: a job of {_nodes(cluster.nodes)} has to wait."
    return f"{free}: a job of {_nodes(cluster.nodes)} could start now."


def _nodes(count: int) -> str:
    return f"{count} node{'' if count == 1 else 's'}"
