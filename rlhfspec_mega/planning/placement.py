"""Placement: which devices each model of a run has, and where its weights are kept while it is not used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from rlhfspec_mega.errors import UserError

ACTOR, ENGINE, REFERENCE, CRITIC, REWARD = "actor", "engine", "reference", "critic", "reward"
FROZEN = (REFERENCE, REWARD)  # models that score samples; those that a run has lie on the same devices
GENERATION = "generation"  # the engines' devices, as a place for frozen models
Devices = list[tuple[int, ...]]  # devices of each rank; devices are numbered node by node


class Residency(StrEnum):
    """Where the weights of a model are kept while it is not used; without GPUs there is no difference."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True)
class ModelPlacement:
    """Placement of one model.

    Attributes:
        devices: those of each rank; a rank is an engine, or a process of Megatron.
        rests: where the weights are kept while the model is not used.
        copy_of: the model that resharding copies the weights from; "": none.
        within: the model in whose processes this one lives; "": it has processes of its own.
    """

    devices: Devices
    rests: Residency = Residency.DEVICE
    copy_of: str = ""
    within: str = ""


@dataclass(frozen=True)
class Placement:
    """Placement of all models of a run, by name."""

    places: Mapping[str, ModelPlacement]

    def devices(self, model: str) -> Devices:
        """Devices of each rank of a model; [] if the run does not have this model."""
        return self.places[model].devices if model in self.places else []

    def processes(self) -> dict[str, Devices]:
        """Devices of each process, by model, for models that have processes of their own."""
        return {model: place.devices for model, place in self.places.items() if not place.within}

    @property
    def scorer(self) -> str | None:
        """The frozen model in whose processes all frozen models score on generation devices; None if there are none."""
        return next((model for model in FROZEN if model in self.processes()), None)

    def share_device(self, one: str, other: str) -> bool:
        """Whether a device holds both models."""
        return bool(self._devices_of(one) & self._devices_of(other))

    def max_bytes_per_device(self, needs: Mapping[str, int]) -> int:
        """Most bytes on one device, if each rank of a model needs `needs[model]` bytes on each of its devices."""
        sums = Counter[int]()
        for model, need in needs.items():
            for devices in self.devices(model):
                sums.update(dict.fromkeys(devices, need))
        return max(sums.values(), default=0)

    def _devices_of(self, model: str) -> set[int]:
        return {device for devices in self.devices(model) for device in devices}


@dataclass(frozen=True)
class PlacementRequest:
    """What a placement must provide.

    Attributes:
        devices: number of devices of the cluster.
        replica_devices: devices of one data-parallel replica of the actor: tensor x pipeline parallel size.
        data_parallel: number of data-parallel replicas of the actor; None: as many as the devices allow.
        engines: number of engines; None: as many as the devices allow.
        engine_devices: devices of one engine, which lie next to each other on one node.
        devices_per_node: number of devices of a node.
        frozen: names of the run's frozen models.
        frozen_home: their devices, GENERATION or ACTOR.
        replica_of_frozen: devices of one replica of them on generation devices: their tensor parallel size.
        training_devices: number of devices for the actor under `separate`; None: what the engines leave.
        critic: whether a critic learns on the actor's ranks.
    """

    devices: int
    replica_devices: int
    data_parallel: int | None = None
    engines: int | None = None
    engine_devices: int = 1
    devices_per_node: int = 1
    frozen: tuple[str, ...] = ()
    frozen_home: str = GENERATION
    replica_of_frozen: int = 1
    training_devices: int | None = None
    critic: bool = False


def colocated(request: PlacementRequest) -> Placement:
    """Actor and engines share devices: actor rank i is on device i, and engine 0 begins at device 0.

    Raises UserError if the cluster has too few devices.
    """
    ranks = _actor_ranks(request, request.devices)
    most = request.devices // request.engine_devices
    engines = request.engines or most
    if engines > most:
        raise UserError(
            f"rollout.engines={engines} is too many for the {request.devices} devices of the cluster: use at most "
            f"{most}."
        )
    return _placement(request, ranks, engines, first_engine=0)


def separate(request: PlacementRequest) -> Placement:
    """The actor has the first devices and engines have the next ones: half of all if neither number is set.

    Raises UserError if the cluster has too few devices.
    """
    of_engines = (request.engines or 0) * request.engine_devices or request.devices // 2
    of_actor = request.training_devices or request.devices - of_engines
    ranks = _actor_ranks(request, of_actor)
    if request.training_devices is not None and ranks > request.training_devices:
        raise UserError(
            f"The actor needs {ranks} devices (tensor x pipeline x data parallel) and the nodes of "
            f"placement.training_nodes have {request.training_devices}: raise it, or lower the actor's parallel sizes."
        )
    # Engines begin at a multiple of their size, so that each of them lies on one node.
    first_engine = -(-(request.training_devices or ranks) // request.engine_devices) * request.engine_devices
    engines = request.engines or max(request.devices - first_engine, 0) // request.engine_devices
    needed = max(engines, 1) * request.engine_devices
    if first_engine + needed > request.devices:
        raise UserError(
            f"placement=separate needs {ranks} devices for the actor and {needed} for engines, and the cluster has "
            f"{request.devices}: set cluster.devices_per_node={first_engine + needed}, lower the actor's parallel "
            "sizes, or use placement=colocated."
        )
    return _placement(request, ranks, engines, first_engine)


PLACEMENTS = {"colocated": colocated, "separate": separate}  # choices of placement.mode


def _actor_ranks(request: PlacementRequest, room: int) -> int:
    """Number of actor ranks: of `request.data_parallel` copies, or of as many as fit on `room` devices."""
    ranks = request.replica_devices * (request.data_parallel or max(room // request.replica_devices, 1))
    if ranks > request.devices:
        raise UserError(
            f"The actor needs {ranks} devices (tensor x pipeline x data parallel) and the cluster has "
            f"{request.devices}: lower the actor's parallel sizes or set cluster.devices_per_node={ranks}."
        )
    return ranks


def _placement(request: PlacementRequest, actor_ranks: int, engines: int, first_engine: int) -> Placement:
    size = request.engine_devices
    last_engine = first_engine + engines * size
    places = {
        ACTOR: ModelPlacement([(device,) for device in range(actor_ranks)]),
        ENGINE: ModelPlacement(
            [tuple(range(device, device + size)) for device in range(first_engine, last_engine, size)],
            copy_of=ACTOR,
        ),
    }
    if request.critic:
        places[CRITIC] = ModelPlacement(places[ACTOR].devices, within=ACTOR)
    for model in request.frozen:
        if request.frozen_home == ACTOR:
            places[model] = ModelPlacement(places[ACTOR].devices, Residency.HOST, within=ACTOR)
        else:
            devices, first = _replicas(request, range(first_engine, last_engine)), request.frozen[0]
            places[model] = ModelPlacement(devices, Residency.HOST, within="" if model == first else first)
    return Placement(places)


def _replicas(request: PlacementRequest, devices: range) -> Devices:
    """The device of each rank, for as many replicas as fit; no replica spans two nodes."""
    size, node = request.replica_of_frozen, request.devices_per_node
    starts = [first for first in devices[::size] if first + size <= devices.stop]
    whole = [first for first in starts if first // node == (first + size - 1) // node]
    if not whole:
        raise UserError(
            f"placement.reference_tensor_parallel={size} needs {size} generation devices on one node, and the "
            f"{len(devices)} generation devices do not provide them: lower it, or set placement.reference=actor."
        )
    return [(device,) for first in whole for device in range(first, first + size)]
