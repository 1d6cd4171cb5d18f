"""Point-to-point communicators between neighbouring stages: one for each pair of ranks, model and direction.

With fewer, ranks that compute two models' tasks can wait for each other for ever (planning.pipeline.channels): on a
communicator, operations take place in the order in which each side posted them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from rlhfspec_mega.megatron.groups import new_group


class Neighbour(NamedTuple):
    """The rank of a neighbouring stage, and the communicators with it, for activations and for their gradients."""

    rank: int
    activations: dist.ProcessGroup
    gradients: dist.ProcessGroup


class Channels:
    """A model's channels on one rank; collective over the ranks of each of its pipelines.

    Attributes:
        timeout: longest wait for a transfer.
        before, behind: neighbours by stage; None at the ends of the pipeline.
    """

    def __init__(self, groups: ProcessGroupCollection, timeout: timedelta, device: torch.device) -> None:
        stages, own = dist.get_process_group_ranks(groups.pp), groups.pp.rank()
        self.timeout = timeout
        self.before: Neighbour | None = None
        self.behind: Neighbour | None = None
        # First the pairs that begin with an even stage, then the others: see new_group.
        for first in (own - own % 2, own - 1 + own % 2):
            pair = stages[max(first, 0) : first + 2]
            whole = first >= 0 and len(pair) == 2
            activations, gradients = (new_group(pair if whole else [stages[own]], timeout) for _ in range(2))
            if device.type == "cuda":
                # NCCL connects at the first use, which blocks both ranks: here, in the same order on both.
                for group in (activations, gradients):
                    dist.all_reduce(torch.zeros(1, device=device), group=group)
            if whole and first == own:
                self.behind = Neighbour(stages[own + 1], activations, gradients)
            elif whole:
                self.before = Neighbour(stages[own - 1], activations, gradients)
