"""A TCP store in the driver at which the ranks of the actor, which may be on several hosts, form process groups."""

from __future__ import annotations

from uuid import uuid4

import torch.distributed as dist

from rlhfspec_mega.resharding.collective import listening_store


class MeetingPoint:
    """A TCP store in this process that listens on one address; each meeting point uses a key prefix of its own.

    Attributes:
        address: "store://host:port/prefix", the init_method of `megatron.rendezvous.Rendezvous`.
    """

    def __init__(self, host: str, call_timeout: float) -> None:
        """Listen on a free port of `host`, an address of this machine that every rank can reach."""
        self._store: dist.TCPStore | None = listening_store(host, call_timeout)
        self.address = f"store://{host}:{self._store.port}/{uuid4().hex}"

    def close(self) -> None:
        """Stop listening. Ranks use the store as long as their process groups exist, so end them first."""
        self._store = None
