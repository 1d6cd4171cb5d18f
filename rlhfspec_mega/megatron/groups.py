"""Explicit process groups of one model, so that several models of different parallel sizes share a process.

Megatron-core 0.16 takes them as a ProcessGroupCollection everywhere; its global `parallel_state` is never initialized.
The few globals that it reads nevertheless are set here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from rlhfspec_mega.megatron.description import ParallelRanks, ParallelSizes


def positions(sizes: ParallelSizes) -> list[ParallelRanks]:
    """Each rank's coordinates, in Megatron's order: tensor-parallel peers are neighbours, pipeline stages far apart."""
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
        """The group of the ranks that differ from this one only in these coordinates."""
        fixed = [axis for axis in ParallelRanks._fields if axis not in free]
        return _new([r for r, p in zip(ranks, places, strict=True) if _same(p, here, fixed)], timeout)

    alone = _new([dist.get_rank()], timeout)
    data, everyone = group("dp"), group("tp", "pp", "dp")
    pipeline = group("pp")
    stages = dist.get_process_group_ranks(pipeline)
    ends = sorted({stages[0], stages[-1]})
    at_an_end = dist.get_rank() in ends
    return ProcessGroupCollection(
        tp=group("tp"),
        pp=pipeline,
        mp=group("tp", "pp"),
        embd=_new(ends, timeout) if at_an_end and len(ends) > 1 else alone,
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


def _new(ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup:
    return dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)


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
