"""What a rank is told of a fused schedule, and what it says about it afterwards."""

from __future__ import annotations

from typing import NamedTuple


class RankTask(NamedTuple):
    """A task of one rank: the name of a model, a micro-batch of the rank's shard, forward or backward."""

    model: str
    micro_batch: int
    backward: bool


class TaskTime(NamedTuple):
    """When a task computed, in seconds since the epoch, and how long, without what it waited for."""

    task: RankTask
    start: float
    seconds: float
