"""Where the ranks of an actor group meet when they may live on several hosts: a store on a free port of the driver."""

from __future__ import annotations

from uuid import uuid4

import torch.distributed as dist

from rlhfspec_mega.resharding.collective import listening_store


class MeetingPoint:
    """A TCP store in this process, which listens on one address only; each point has keys of its own.

    Attributes:
        address: "store://host:port/prefix", what `megatron.rendezvous.Rendezvous` takes as init_method.
    """

    def __init__(self, host: str, call_timeout: float) -> None:
        """Listen on a free port of `host`, an address of this machine that every rank can reach."""
        self._store: dist.TCPStore | None = listening_store(host, call_timeout)
        self.address = f"store://{host}:{self._store.port}/{uuid4().hex}"

    def close(self) -> None:
        """Stop listening; ranks still use the store for as long as their groups exist, so close it after them."""
        self._store = None
