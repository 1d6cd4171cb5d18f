"""What decisions about a running rollout are about: engines, their unfinished samples, and where these are to go."""

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
    """How fast an engine decodes, by the number of samples it decodes at once; speculation included.

    Attributes:
        batches: ascending, from 1.
        seconds: in which each of so many samples gains one token, on average.
    """

    batches: tuple[int, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class EngineState:
    """An engine that serves.

    Attributes:
        slots: samples it decodes at once; more wait.
        kv_tokens: room in its KV cache, in tokens of all samples together.
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
        at: index into `engines` of the engine that holds (or queues) the sample; of one under way, where it goes to.
        groups: number of the sample's group (samples of one prompt).
        generated: response tokens so far.
        lengths: tokens of prompt and response so far.
        remaining: response tokens still to come, as predicted; at least 1.
        movable: false for samples under way, and for those that cannot be moved.
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
    """What moving one sample takes.

    Attributes:
        downtime: seconds in which the sample is decoded nowhere.
        per_token: seconds of both engines' time for each token of KV that is copied.
        prefill: seconds for each token of the prompt of a sample that has not begun. An upper bound: members of a group
            that move together share one prefill, and the source is spared its own.
    """

    downtime: float
    per_token: float
    prefill: float = 0.0


@dataclass(frozen=True)
class Move:
    """A sample (index into the state's arrays) goes to another engine (index into its engines)."""

    sample: int
    destination: int


@dataclass(frozen=True)
class Plan:
    """What to do now.

    Attributes:
        freed: engines (indices) that are given no more samples in this rollout: once empty they do other work.
    """

    moves: tuple[Move, ...] = ()
    freed: tuple[int, ...] = ()


class RolloutPolicy(Protocol):
    """Decides while a rollout runs. A function of the states it was shown, in their order: deterministic."""

    def begin(self) -> None:
        """A new rollout begins."""

    def plan(self, state: RolloutState) -> Plan:
        """Called again and again: after `rollout.poll_interval` or more, sooner if an engine has run out of samples."""
