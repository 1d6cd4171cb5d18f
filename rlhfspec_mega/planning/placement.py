"""Where every model of a run lies, as data: what is on which devices, and where its weights rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from rlhfspec_mega.errors import UserError

ACTOR, ENGINE, REFERENCE = "actor", "engine", "reference"
GENERATION = "generation"  # devices: those of the engines
Devices = list[tuple[int, ...]]  # of each rank; devices are numbered node by node


class Residency(StrEnum):
    """Where the weights of a model rest while it is not used; on a CPU the two are one."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True)
class Place:
    """One model's.

    Attributes:
        devices: by rank, an engine or a rank of Megatron.
        rests: where its weights are while it is not used.
        copy_of: the model whose weights these are a copy of, brought by resharding; "": none.
        within: the model in whose processes it lies; "": it has processes of its own.
    """

    devices: Devices
    rests: Residency = Residency.DEVICE
    copy_of: str = ""
    within: str = ""


@dataclass(frozen=True)
class Placement:
    """All models of a run by name."""

    places: Mapping[str, Place]

    def devices(self, model: str) -> Devices:
        """Of each rank of a model; nothing for a model that the run does not have."""
        return self.places[model].devices if model in self.places else []

    def processes(self) -> dict[str, Devices]:
        """By model, for those that have processes of their own, the devices of each process."""
        return {model: place.devices for model, place in self.places.items() if not place.within}

    def shares(self, one: str, other: str) -> bool:
        """Whether a device holds both models."""
        return bool(self._held_by(one) & self._held_by(other))

    def fullest(self, needs: Mapping[str, int]) -> int:
        """Bytes on the device that has most, if each rank of a model needs so many on each of its devices."""
        sums = Counter[int]()
        for model, need in needs.items():
            for devices in self.devices(model):
                sums.update(dict.fromkeys(devices, need))
        return max(sums.values(), default=0)

    def _held_by(self, model: str) -> set[int]:
        return {device for devices in self.devices(model) for device in devices}


@dataclass(frozen=True)
class Wishes:
    """What a placement is made for.

    Attributes:
        devices: of the whole cluster.
        copy: devices of one data-parallel copy of the actor, tensor x pipeline.
        copies: of the actor; None: as many as there is room for.
        engines: None: as many as there is room for.
        engine_devices: of one engine, neighbours on one node.
        node: devices of a node.
        reference: where a frozen reference lies, GENERATION or ACTOR; None: there is none.
        reference_devices: of one replica on generation devices, its tensor-parallel size.
    """

    devices: int
    copy: int
    copies: int | None = None
    engines: int | None = None
    engine_devices: int = 1
    node: int = 1
    reference: str | None = None
    reference_devices: int = 1


def colocated(wishes: Wishes) -> Placement:
    """Actor rank i is on device i, and engine 0 begins at device 0.

    Raises UserError for more ranks than devices.
    """
    ranks = _actor_ranks(wishes, wishes.devices)
    most = wishes.devices // wishes.engine_devices
    engines = wishes.engines or most
    if engines > most:
        raise UserError(
            f"rollout.engines={engines} is more than the {wishes.devices} devices of the cluster hold: use at most "
            f"{most}."
        )
    return _placement(wishes, ranks, engines, first_engine=0)


def separate(wishes: Wishes) -> Placement:
    """The actor holds the first devices, engines the next ones, unless told half of all.

    Raises UserError for more ranks than devices.
    """
    of_engines = (wishes.engines or 0) * wishes.engine_devices or wishes.devices // 2
    ranks = _actor_ranks(wishes, wishes.devices - of_engines)
    engines = wishes.engines or max(wishes.devices - ranks, 0) // wishes.engine_devices
    # A multiple of an engine's devices: an engine stays on one node.
    first_engine = -(-ranks // wishes.engine_devices) * wishes.engine_devices
    needed = max(engines, 1) * wishes.engine_devices
    if first_engine + needed > wishes.devices:
        raise UserError(
            f"placement=separate needs {ranks} devices for the actor and {needed} for engines, and the cluster has "
            f"{wishes.devices}: set cluster.devices_per_node={first_engine + needed}, lower the actor's parallel "
            "sizes, or use placement=colocated."
        )
    return _placement(wishes, ranks, engines, first_engine)


PLACEMENTS = {"colocated": colocated, "separate": separate}  # choices of placement.mode


def _actor_ranks(wishes: Wishes, room: int) -> int:
    """Of the copies given, or of as many as `room` devices hold."""
    ranks = wishes.copy * (wishes.copies or max(room // wishes.copy, 1))
    if ranks > wishes.devices:
        raise UserError(
            f"The actor needs {ranks} devices (tensor x pipeline x data parallel) and the cluster has "
            f"{wishes.devices}: lower the actor's parallel sizes or set cluster.devices_per_node={ranks}."
        )
    return ranks


def _placement(wishes: Wishes, actor_ranks: int, engines: int, first_engine: int) -> Placement:
    size = wishes.engine_devices
    last_engine = first_engine + engines * size
    places = {
        ACTOR: Place([(device,) for device in range(actor_ranks)]),
        ENGINE: Place(
            [tuple(range(device, device + size)) for device in range(first_engine, last_engine, size)],
            copy_of=ACTOR,
        ),
    }
    if wishes.reference == ACTOR:
        places[REFERENCE] = Place(places[ACTOR].devices, Residency.HOST, within=ACTOR)
    elif wishes.reference == GENERATION:
        places[REFERENCE] = Place(_replicas(wishes, range(first_engine, last_engine)), Residency.HOST)
    return Placement(places)


def _replicas(wishes: Wishes, devices: range) -> Devices:
    """A device for every rank of as many replicas as there is room for, none of which spans two nodes."""
    size = wishes.reference_devices
    starts = [first for first in devices[::size] if first + size <= devices.stop]
    whole = [first for first in starts if first // wishes.node == (first + size - 1) // wishes.node]
    if not whole:
        raise UserError(
            f"placement.reference_tensor_parallel={size} needs as many generation devices on one node, and the "
            f"{len(devices)} there are do not hold a replica: lower it, or set placement.reference=actor."
        )
    return [(device,) for first in whole for device in range(first, first + size)]
