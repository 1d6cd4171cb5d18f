"""Explicit process groups of one model, so that several models of different parallel sizes share a process.

Megatron-core 0.16 takes them as a ProcessGroupCollection everywhere; its global `parallel_state` is never initialized.
The few globals that it reads nevertheless are set here, and nowhere else.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from rlhfspec_mega.megatron.description import ParallelRanks, ParallelSizes


def positions(sizes: ParallelSizes) -> list[ParallelRanks]:
    """Each rank's coordinates, in Megatron's order: tensor-parallel peers are neighbours, pipeline stages far apart.

    A pipeline that runs opposite to another one (ParallelSizes.opposed_to) lies on the same ranks as one of the other's
    pipelines, or on a part of them, in reverse order.
    """
    if sizes.opposed_to:
        beside = sizes.opposed_to // sizes.pipeline  # replicas along one pipeline of the other model
        return [
            ParallelRanks(tp, sizes.pipeline - 1 - stage % sizes.pipeline, dp * beside + stage // sizes.pipeline)
            for stage in range(sizes.opposed_to)
            for dp in range(sizes.data // beside)
            for tp in range(sizes.tensor)
        ]
    return [
        ParallelRanks(tp, pp, dp)
        for pp in range(sizes.pipeline)
        for dp in range(sizes.data)
        for tp in range(sizes.tensor)
    ]


def make_groups(sizes: ParallelSizes, ranks: Sequence[int], timeout: timedelta) -> ProcessGroupCollection:
    """Create the process groups of a model that lies on these global ranks, in ascending order.

    Collective over these ranks. A process that is part of several models must create their groups in the same order as
    its peers do. The embedding group is in the order of stages: in any other, Megatron leaves a tied output weight at
    zero.
    """
    places = positions(sizes)
    here = places[ranks.index(dist.get_rank())]

    def group(*free: str) -> dist.ProcessGroup:
        """The group of the ranks that differ from this one only in these coordinates, in the order of the last."""
        fixed = [axis for axis in ParallelRanks._fields if axis not in free]
        found = [(p, r) for r, p in zip(ranks, places, strict=True) if _same(p, here, fixed)]
        return new_group([r for _, r in sorted(found, key=lambda one: (getattr(one[0], free[-1]), one[1]))], timeout)

    alone = new_group([dist.get_rank()], timeout)
    data, everyone = group("dp"), new_group(ranks, timeout)
    pipeline = group("pp")
    stages = dist.get_process_group_ranks(pipeline)
    ends = list(dict.fromkeys([stages[0], stages[-1]]))
    embedding = new_group(ends if dist.get_rank() in ends else [dist.get_rank()], timeout)
    return ProcessGroupCollection(
        tp=group("tp"),
        pp=pipeline,
        mp=group("tp", "pp"),
        embd=embedding,
        pos_embd=alone,
        cp=alone,
        ep=alone,
        expt_tp=alone,
        tp_ep_pp=alone,
        dp=data,
        dp_cp=data,
        expt_dp=alone,
        intra_dist_opt=everyone,  # gradients are clipped by the norm over all of the model; None would mean the world
    )


def _same(left: ParallelRanks, right: ParallelRanks, axes: Sequence[str]) -> bool:
    return all(getattr(left, axis) == getattr(right, axis) for axis in axes)


class _Placed(int):
    """A rank that sorts as its place in a list says."""

    place = 0

    def __lt__(self, other: object) -> bool:
        return self.place < other.place if isinstance(other, _Placed) else NotImplemented


def new_group(ranks: Sequence[int], timeout: timedelta, backend: str | None = None) -> dist.ProcessGroup:
    """A process group of these global ranks, in this order; only they call this.

    All of them must have created as many groups before: torch puts that number into the group's name. So every rank
    creates a group wherever another one does, if need be of itself alone.

    Args:
        backend: None: that of the default group.
    """
    options: dict[str, Any] = {"timeout": timeout, "backend": backend, "use_local_synchronization": True}
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        return dist.new_group(list(ranks), **options, sort_ranks=False)
    return dist.new_group(placed(ranks), **options)


def placed(ranks: Sequence[int]) -> list[int]:
    """The ranks as numbers that `sorted` leaves in this order: torch before 2.13 sorts the ranks of a group."""
    found = [_Placed(rank) for rank in ranks]
    for place, rank in enumerate(found):
        rank.place = place
    return list(found)


def ranks_in(groups: ProcessGroupCollection) -> ParallelRanks:
    """Coordinates of this process."""
    return ParallelRanks(groups.tp.rank(), groups.pp.rank(), groups.dp.rank())


def ensure_memory_buffer() -> None:
    """Create the buffer that Megatron keeps per process for the gathers of sequence parallelism."""
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()


@contextmanager
def saving(groups: ProcessGroupCollection) -> Iterator[None]:
    """Context for building a model's sharded state.

    Megatron asks its globals for the replica of a tied output weight.
    """
    parallel_state.set_data_parallel_rank(groups.dp.rank())
    try:
        yield
    finally:
        parallel_state.set_data_parallel_rank(None)
