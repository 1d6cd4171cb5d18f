"""Where the ranks of one actor group meet; plain data, so that a driver without Megatron can make it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of one group meet. `init_method` is file://... on one host, tcp://host:port between hosts."""

    init_method: str
    rank: int
    world_size: int
    deadline_seconds: float


@dataclass(frozen=True)
class ParallelRanks:
    """Coordinates of this rank in the TP x PP x DP grid."""

    tp: int
    pp: int
    dp: int
