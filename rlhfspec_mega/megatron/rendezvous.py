"""Where the ranks of one group meet; plain data, so that a driver without Megatron can create it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

STORE = "store"  # scheme of a store that the driver hosts


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of one group meet.

    `init_method` is store://host:port/prefix for a store that the driver hosts (cluster.meeting_point), or what
    torch.distributed takes, such as file://... on one host.
    """

    init_method: str
    rank: int
    world_size: int
    call_timeout: float

    def again(self, launch: int) -> Rendezvous:
        """The meeting place of this launch: a store still holds keys of earlier launches."""
        return replace(self, init_method=f"{self.init_method}.{launch}")

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of init_process_group for this meeting place; connects to a store.

        Raises:
            torch.distributed.DistError: the store cannot be reached within the deadline.
        """
        url = urlsplit(self.init_method)
        if url.scheme != STORE:
            return {"init_method": self.init_method}
        assert url.hostname and url.port
        timeout = timedelta(seconds=self.call_timeout)
        store = dist.TCPStore(url.hostname, url.port, is_master=False, timeout=timeout)
        return {"store": dist.PrefixStore(url.path.strip("/"), store)}
