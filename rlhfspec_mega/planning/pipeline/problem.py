"""What a pipeline schedule is for: pipelines of one or two models, and how long each of their tasks takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlhfspec_mega.errors import UserError

Doubles = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Pipeline:
    """One pipeline: a model, or one data-parallel replica of it.

    Attributes:
        model: 0 or 1.
        devices: the device of each stage; no device twice.
        forward, backward: seconds of each task, [stages, micro-batches].
        activation: bytes that a micro-batch keeps on a stage from its forward to its backward, [stages, micro-batches].
    """

    model: int
    devices: tuple[int, ...]
    forward: Doubles
    backward: Doubles
    activation: Doubles

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.devices)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of one update."""
        return self.forward.shape[1]

    @cached_property
    def lengths(self) -> Doubles:
        """[micro-batches] seconds of all tasks of a micro-batch."""
        return (self.forward + self.backward).sum(axis=0)


@dataclass(frozen=True, eq=False)
class Problem:
    """Pipelines that share devices, which compute one task at a time.

    Attributes:
        memory: most bytes of activations on each device, or on any; infinite by default.
    """

    pipelines: tuple[Pipeline, ...]
    memory: float | tuple[float, ...] = float("inf")

    @cached_property
    def devices(self) -> int:
        """Number of devices."""
        return 1 + max(max(one.devices) for one in self.pipelines)

    @cached_property
    def capacities(self) -> Doubles:
        """Most bytes of activations on each device."""
        return np.broadcast_to(np.array(self.memory, np.float64), (self.devices,)).copy()

    def fits(self, peaks: Sequence[float]) -> bool:
        """Whether no device holds more than it may."""
        return bool((np.array(peaks) <= self.capacities).all())

    @cached_property
    def tasks(self) -> int:
        """Number of tasks: a forward and a backward of each micro-batch on each stage."""
        return sum(2 * one.stages * one.micro_batches for one in self.pipelines)

    @cached_property
    def mean_task(self) -> float:
        """Mean seconds of a task."""
        return float(sum(one.lengths.sum() for one in self.pipelines)) / self.tasks

    @cached_property
    def hosted(self) -> list[list[tuple[int, int]]]:
        """Of each device: (pipeline, stage) of what it computes."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(self.devices)]
        for index, one in enumerate(self.pipelines):
            for stage, device in enumerate(one.devices):
                found[device].append((index, stage))
        return found

    def of_model(self, model: int) -> Problem:
        """The same with the pipelines of one model only."""
        return Problem(tuple(one for one in self.pipelines if one.model == model), self.memory)

    @property
    def models(self) -> list[int]:
        """Models, ascending."""
        return sorted({one.model for one in self.pipelines})


def opposed_pipelines(
    stages: Sequence[int],
    forward: Sequence[Doubles],
    backward: Sequence[Doubles],
    activation: Sequence[Doubles],
    memory: float = float("inf"),
) -> Problem:
    """One model, or two whose pipelines run in opposite directions (RLHFuse, arXiv 2409.13221).

    Model 0 has a stage on each of the P0 devices, ascending. Model 1 has P0 / P1 replicas of P1 stages, each on
    neighbouring devices, descending.

    Args:
        stages: P0, and P1 of a second model.
        forward, backward, activation: of each model, [replicas, stages, micro-batches of a replica].

    Raises UserError if P1 does not divide P0.
    """
    devices = stages[0]
    pipelines = [Pipeline(0, tuple(range(devices)), forward[0][0], backward[0][0], activation[0][0])]
    if len(stages) > 1:
        size = stages[1]
        if size < 1 or devices % size:
            raise UserError(
                f"{size} pipeline stages of the second model do not divide the {devices} of the first: use one of "
                f"{', '.join(str(n) for n in range(1, devices + 1) if devices % n == 0)}."
            )
        for replica in range(devices // size):
            first = replica * size
            pipelines.append(
                Pipeline(
                    1,
                    tuple(range(first + size - 1, first - 1, -1)),
                    forward[1][replica],
                    backward[1][replica],
                    activation[1][replica],
                )
            )
    return Problem(tuple(pipelines), memory)
