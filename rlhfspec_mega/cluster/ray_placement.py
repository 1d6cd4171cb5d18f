"""Placement groups: the devices of each role reserved in a Ray cluster, neighbours on one node."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhfspec_mega.errors import UserError

_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Place:
    """A worker's share of a placement group's bundle.

    Attributes:
        gpus: GPUs to request from Ray, maybe a fraction of one.
        visible: GPU ids to set instead, for a worker with several GPUs, which Ray cannot share between actors.
    """

    group: PlacementGroup
    bundle: int
    gpus: float
    visible: tuple[str, ...] | None = None


# Ray resources of nodes that a run with placement.training_nodes tells apart; a bundle takes a trace of one.
TRAINING, GENERATION = "training", "generation"
_TRACE = 0.001


class Reservation:
    """One placement group per role, or one for all roles that share devices; one bundle per device, or per several.

    Bundles are numbered by node, so that neighbouring device indices, such as a tensor-parallel group, share a node.
    """

    def __init__(
        self,
        places: Mapping[str, Sequence[tuple[int, ...]]],
        *,
        threads: int,
        use_gpus: bool,
        training_devices: int | None,
        seconds: float,
        where: str,
    ) -> None:
        """Reserve and wait at most `seconds` for room.

        Args:
            places: device indices of every rank of every role: a number of neighbours, from a multiple of it on, which
                lie on one node.
            threads: CPUs per worker.
            training_devices: the first so many devices lie on nodes that offer the resource TRAINING, the others on
                such with GENERATION; None: on any node.
            where: name of the cluster, for messages.

        Raises:
            UserError: the cluster has too little, or others hold it for too long.
        """
        self._groups: list[PlacementGroup] = []
        self._places: dict[str, list[Place]] = {}
        each = devices_of_bundle(places)
        bundle_of = {role: [devices[0] // each for devices in ranks] for role, ranks in places.items()}
        workers = Counter(bundle for bundles in bundle_of.values() for bundle in bundles)
        gpus = {"GPU": float(each)} if use_gpus else {}
        asked = {
            bundle: {"CPU": float(threads * count)} | gpus | _kind_of_node(bundle * each, training_devices)
            for bundle, count in workers.items()
        }
        _check_total(list(asked.values()), where)
        end = time.monotonic() + seconds
        try:
            for roles in roles_sharing_devices(bundle_of):
                wanted = sorted({bundle for role in roles for bundle in bundle_of[role]})
                numbers = self._reserve([asked[bundle] for bundle in wanted], end, seconds, where)
                number_of = dict(zip(wanted, numbers, strict=True))
                ids = _gpus_of(self._groups[-1], numbers, each) if use_gpus and each > 1 else {}
                for role in roles:
                    self._places[role] = [
                        self._share_of(number_of[devices[0] // each], devices, workers, ids, use_gpus)
                        for devices in places[role]
                    ]
        except BaseException:
            self.close()
            raise

    def _share_of(
        self,
        number: int,
        devices: tuple[int, ...],
        workers: Mapping[int, int],
        ids: Mapping[int, list[str]],
        use_gpus: bool,
    ) -> Place:
        if number in ids:
            known = ids[number]
            return Place(self._groups[-1], number, 0.0, tuple(known[device % len(known)] for device in devices))
        return Place(self._groups[-1], number, _share(workers[devices[0]]) if use_gpus else 0.0)

    def place(self, role: str, rank: int) -> Place:
        return self._places[role][rank]

    def nodes(self) -> set[str]:
        """Ids of the nodes on which bundles lie."""
        return {node for group in self._groups for node in _node_of_bundle(group).values()}

    def close(self) -> None:
        """Give everything back; safe to call twice."""
        while self._groups:
            remove_placement_group(self._groups.pop())

    def _reserve(self, bundles: list[dict[str, float]], end: float, seconds: float, where: str) -> list[int]:
        """Bundle numbers in the order of nodes."""
        group = placement_group(bundles, strategy="PACK")
        self._groups.append(group)
        while not group.wait(_POLL_SECONDS):  # short waits, so that Ctrl-C is heard
            if time.monotonic() > end:
                raise UserError(
                    f"The Ray cluster at {where} had no room for this run within {seconds:g} s: it asks for "
                    f"{_in_words(bundles)}, and {_amounts(ray.available_resources())} are free. Wait for other jobs, "
                    "add nodes, or raise launcher.start_timeout."
                )
        nodes = _node_of_bundle(group)
        return sorted(range(len(bundles)), key=lambda bundle: (nodes[bundle], bundle))


def _kind_of_node(device: int, training_devices: int | None) -> dict[str, float]:
    """What a bundle that begins with this device asks for besides CPUs and GPUs."""
    if training_devices is None:
        return {}
    return {TRAINING if device < training_devices else GENERATION: _TRACE}


def devices_of_bundle(places: Mapping[str, Sequence[tuple[int, ...]]]) -> int:
    """Devices per bundle: as many as the worker with most devices has."""
    return max(len(devices) for ranks in places.values() for devices in ranks)


def _gpus_of(group: PlacementGroup, bundles: Sequence[int], each: int) -> dict[int, list[str]]:
    """Ids of the GPUs of every bundle, as CUDA_VISIBLE_DEVICES takes them."""

    @ray.remote(num_cpus=0, num_gpus=each)
    def look() -> list[str]:
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    looks = [
        look.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle)).remote() for bundle in bundles
    ]
    return {bundle: sorted(ids, key=_by_number) for bundle, ids in zip(bundles, ray.get(looks), strict=True)}


def _by_number(gpu: str) -> tuple[int, str]:
    return (int(gpu), "") if gpu.isdigit() else (0, gpu)


def roles_sharing_devices(places: Mapping[str, Sequence[int]]) -> list[list[str]]:
    """Roles in sets, so that roles of different sets have no device in common."""
    sets: list[tuple[list[str], set[int]]] = []
    for role, devices in places.items():
        joined: tuple[list[str], set[int]] = ([role], set(devices))
        for other in [entry for entry in sets if entry[1] & joined[1]]:
            sets.remove(other)
            joined = (other[0] + joined[0], other[1] | joined[1])
        sets.append(joined)
    return [roles for roles, _ in sets]


def _check_total(bundles: list[dict[str, float]], where: str) -> None:
    """Refuse at once what could never be placed."""
    has = ray.cluster_resources()
    total = {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in ("CPU", "GPU")}
    if total["GPU"] > has.get("GPU", 0.0):
        raise UserError(
            f"This run wants {total['GPU']:g} GPUs, and Ray at {where} sees {has.get('GPU', 0.0):g}: "
            f"{nodes_in_words(ray.nodes())}. Start Ray on the nodes that lack, or set cluster.nodes and "
            "cluster.devices_per_node to what is there."
        )
    kinds = {kind for bundle in bundles for kind in bundle if kind in (TRAINING, GENERATION)}
    if missing := sorted(kind for kind in kinds if kind not in has):
        raise UserError(
            f"No node of the Ray cluster at {where} offers the resource {' or '.join(missing)}, which "
            "placement.training_nodes asks for: start those nodes with "
            f"`ray start --resources='{{\"{missing[0]}\": 1}}'`, or leave placement.training_nodes out."
        )
    if any(amount > has.get(name, 0.0) for name, amount in total.items()):
        raise UserError(
            f"The Ray cluster at {where} is too small: this run asks for {_amounts(total)} and the cluster has "
            f"{_amounts(has)}. Add nodes, or lower cluster.threads_per_worker, rollout.engines or the actor's parallel "
            "sizes."
        )
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for bundle in bundles:
        if not any(all(node.get(name, 0.0) >= amount for name, amount in bundle.items()) for node in nodes):
            raise UserError(
                f"No node of the Ray cluster at {where} has {_amounts(bundle)} for the workers of one device: lower "
                "cluster.threads_per_worker, or use placement=separate."
            )


def nodes_in_words(nodes: Sequence[Mapping[str, Any]]) -> str:
    """GPUs by node: those that have fewer than the others, else how many each has.

    A node that has left Ray counts as one without GPUs.
    """
    gpus = Counter[str]()
    for node in nodes:
        gpus[node["NodeManagerHostname"]] += int(node["Resources"].get("GPU", 0)) if node["Alive"] else 0
    most = max(gpus.values())
    fewer = [f"{name} has {count}" for name, count in sorted(gpus.items()) if count < most]
    return ", ".join(fewer) or f"{len(gpus)} node{'s' if len(gpus) > 1 else ''} with {most} each"


def _node_of_bundle(group: PlacementGroup) -> dict[int, str]:
    return dict(placement_group_table(group)["bundles_to_node_id"])


def _share(workers: int) -> float:
    """Each worker's part of a GPU, rounded down to Ray's precision so that all fit."""
    return int(1e4 / workers) / 1e4


def _amounts(resources: Mapping[str, float]) -> str:
    return f"{resources.get('CPU', 0.0):g} CPUs and {resources.get('GPU', 0.0):g} GPUs"


def _in_words(bundles: list[dict[str, float]]) -> str:
    counts = Counter(_amounts(bundle) for bundle in bundles)
    return ", ".join(f"{count} x ({amounts})" for amounts, count in counts.items())
