"""The data of decisions during a rollout: engines, their unfinished samples, and planned moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Throughput:
    """How fast an engine decodes, by the number of samples in its batch, with speculation if it drafts.

    Attributes:
        batches: numbers of samples, ascending from 1.
        seconds: mean seconds in which each sample of such a batch gains one token.
    """

    batches: tuple[int, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class EngineState:
    """An engine that can decode.

    Attributes:
        slots: most samples that it decodes at once; others wait.
        kv_tokens: capacity of its KV cache, in tokens of all samples together.
    """

    rank: int
    slots: int
    kv_tokens: int
    throughput: Throughput


@dataclass(frozen=True)
class RolloutState:
    """A rollout at one moment, one entry per unfinished sample.

    Attributes:
        now: seconds since the rollout began.
        at: index into `engines` of the engine that decodes or queues the sample; its destination while it migrates.
        groups: number of the sample's group (the samples of one prompt).
        generated: response tokens so far.
        lengths: tokens of prompt and response so far.
        remaining: predicted response tokens still to be decoded; at least 1.
        movable: whether the sample can be moved now; false while it migrates.
    """

    now: float
    engines: tuple[EngineState, ...]
    ids: tuple[str, ...]
    at: Ints
    groups: Ints
    generated: Ints
    lengths: Ints
    remaining: Floats
    movable: Bools


@dataclass(frozen=True)
class MigrationCost:
    """The time that moving one sample takes.

    Attributes:
        downtime: seconds in which no engine decodes the sample.
        per_token: seconds that each of the two engines loses per copied token of KV.
        prefill: seconds per prompt token of a sample that has not started. An upper bound: samples of a group that move
            together share one prefill, and the source no longer needs one.
    """

    downtime: float
    per_token: float
    prefill: float = 0.0


@dataclass(frozen=True)
class Move:
    """A sample (index into the state's arrays) is to move to another engine (index into the state's engines)."""

    sample: int
    destination: int


@dataclass(frozen=True)
class Plan:
    """What a policy decides at one moment.

    Attributes:
        freed: engines (indices) that get no more samples in this rollout; once empty, they do other work.
    """

    moves: tuple[Move, ...] = ()
    freed: tuple[int, ...] = ()


class RolloutPolicy(Protocol):
    """Decides about moves while a rollout runs. Decisions depend only on the states it was given, in their order."""

    def begin(self) -> None:
        """Start a new rollout."""

    def plan(self, state: RolloutState) -> Plan:
        """Called about every `rollout.poll_interval`, and soon after an engine has run out of samples."""
