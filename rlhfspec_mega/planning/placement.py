"""Which devices each role runs on; nothing else knows where a role lives."""

from __future__ import annotations

from rlhfspec_mega.errors import UserError

ACTOR, ENGINE = "actor", "engine"


def place(mode: str, devices: int, actor_ranks: int, engines: int) -> dict[str, list[int]]:
    """The device index of every rank of every role.

    "colocated": actor rank i and engine i share device i. "separate": the actor holds the first devices, engines the
    next ones.

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
        if engines > devices:
            raise UserError(
                f"rollout.engines={engines} is more than the {devices} devices of the cluster: use at most {devices}."
            )
        first_engine = 0
    else:
        free = devices - actor_ranks
        if engines > free or free == 0:
            raise UserError(
                f"placement=separate needs {actor_ranks} devices for the actor and {max(engines, 1)} for engines, and "
                f"the cluster has {devices}: set cluster.devices_per_node={actor_ranks + max(engines, 1)}, lower the "
                "actor's parallel sizes, or use placement=colocated."
            )
        first_engine = actor_ranks
    return {ACTOR: list(range(actor_ranks)), ENGINE: list(range(first_engine, first_engine + engines))}
