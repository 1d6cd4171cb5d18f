"""The process groups that write a model's checkpoints, beside training: what becomes of them when a collective fails.

A failed save must do no harm, and no rank may wait long for one that has given up. Therefore a rank whose collective
has failed closes its connections, which ends the waits of its peers, and the next save begins with fresh groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from rlhfspec_mega.megatron.groups import new_group

# Ranks that write nothing wait here for those that do, so only the driver knows when a save takes too long.
_TIMEOUT = timedelta(days=1)
_NEVER_SENT = 1  # a tag; everything else has 0


class SavingGroups:
    """Groups over gloo for checkpoints alone, so that one may be written while the model trains; collective to create.

    Args:
        ranks: global ranks of the model, ascending.
        data_ranks: those of them that are this rank's data-parallel peers, in their order.
        timeout: longest wait within a collective.

    Attributes:
        everyone, data: the groups of `ranks` and of `data_ranks`.
    """

    everyone: dist.ProcessGroup
    data: dist.ProcessGroup

    def __init__(self, ranks: Sequence[int], data_ranks: Sequence[int], timeout: timedelta = _TIMEOUT) -> None:
        self._ranks, self._data_ranks, self._timeout = list(ranks), list(data_ranks), timeout
        self._create()

    def _create(self) -> None:
        self.everyone, self.data = self._new(self._ranks), self._new(self._data_ranks)
        self._closed = False

    def _new(self, ranks: list[int]) -> dist.ProcessGroup:
        return new_group(ranks, self._timeout, backend="gloo")

    def close(self) -> None:
        """Close this rank's connections, so that peers that wait in a collective fail at once.

        Gloo closes all connections of a group when a wait in it times out. Destroying the group would do it, too, but
        torch may give its name, under which its ranks met, to the next one.
        """
        self._closed = True
        for group in (self.everyone, self.data):
            for rank in dist.get_process_group_ranks(group):
                if rank != dist.get_rank():
                    with contextlib.suppress(RuntimeError):  # the timeout, or closed already
                        received = dist.irecv(torch.empty(1), rank, group, tag=_NEVER_SENT)
                        assert received is not None
                        received.wait(timedelta(milliseconds=1))

    def renew_if_closed(self, over: dist.ProcessGroup, device: torch.device) -> bool:
        """Create the groups anew if any rank has closed its own; collective, between saves. Returns whether it did so.

        Args:
            over: another group of the same ranks.
            device: where tensors of that group lie.
        """
        closed = torch.tensor([int(self._closed)], device=device)
        dist.all_reduce(closed, dist.ReduceOp.MAX, group=over)
        if closed.item() == 0:
            return False
        self._create()
        return True
