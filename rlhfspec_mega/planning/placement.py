"""Which devices each role runs on; nothing else knows where a role lives."""

from __future__ import annotations

from rlhfspec_mega.errors import UserError

ACTOR, ENGINE = "actor", "engine"
Places = dict[str, list[tuple[int, ...]]]  # by role, the devices of each rank


def place(mode: str, devices: int, actor_ranks: int, engines: int, engine_devices: int = 1) -> Places:
    """The device indices of every rank of every role; an engine has `engine_devices` neighbours.

    "colocated": actor rank i is on device i, and engine 0 begins at device 0. "separate": the actor holds the first
    devices, engines the next ones.

    Args:
        devices: devices of the whole cluster, numbered 0 .. devices - 1, node by node.

    Raises:
        UserError: more ranks than devices.
    """
    if actor_ranks > devices:
        raise UserError(
            f"The actor needs {actor_ranks} devices (tensor x pipeline x data parallel) and the cluster has {devices}: "
            f"lower the actor's parallel sizes or set cluster.devices_per_node={actor_ranks}."
        )
    if mode == "colocated":
        most = devices // engine_devices
        if engines > most:
            raise UserError(
                f"rollout.engines={engines} is more than the {devices} devices of the cluster hold: use at most {most}."
            )
        first_engine = 0
    else:
        # A multiple of an engine's devices: an engine stays on one node.
        first_engine = -(-actor_ranks // engine_devices) * engine_devices
        needed = max(engines, 1) * engine_devices
        if first_engine + needed > devices:
            raise UserError(
                f"placement=separate needs {actor_ranks} devices for the actor and {needed} for engines, and "
                f"the cluster has {devices}: set cluster.devices_per_node={first_engine + needed}, lower the "
                "actor's parallel sizes, or use placement=colocated."
            )
    last_engine = first_engine + engines * engine_devices
    return {
        ACTOR: [(device,) for device in range(actor_ranks)],
        ENGINE: [
            tuple(range(device, device + engine_devices)) for device in range(first_engine, last_engine, engine_devices)
        ],
    }
