"""Plans fused passes: from the micro-batches of two models to the order of each rank's tasks, or to none at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.planning.pipeline.baselines import serial
from rlhfspec_mega.planning.pipeline.channels import find_deadlock
from rlhfspec_mega.planning.pipeline.fused_model import FusedModel
from rlhfspec_mega.planning.pipeline.problem import Doubles, Problem, opposed_pipelines
from rlhfspec_mega.planning.pipeline.rank_task import RankTask
from rlhfspec_mega.planning.pipeline.schedule import Schedule
from rlhfspec_mega.planning.pipeline.task_costs import TaskCosts

MIN_GAIN = 1.05  # a predicted gain below this is not worth leaving Megatron's own schedule
LEARN_AFTER = 30  # mini-batches that are not fused, after which one is: only fused ones tell what tasks cost


@dataclass(frozen=True)
class FusedPlan:
    """Of each pipeline of the first model, the tasks of each of its stages; and what is predicted.

    Attributes:
        makespan, serial: seconds of the slowest pipeline, fused and one model after the other.
    """

    tasks: Sequence[Sequence[Sequence[RankTask]]]
    makespan: float
    serial: float

    @property
    def gain(self) -> float:
        """How many times faster than one model after the other."""
        return self.serial / self.makespan


class FusionPlanner:
    """Decides for each mini-batch whether two models train in one pass, and in which order.

    Activations may take as much memory on a device as both models' 1F1B schedules need there at their peaks.

    Args:
        first, second: the models; the pipeline of the first has as many stages as that of the second, or a multiple.
        always: fuse whatever gain is predicted.
        fixed_costs: see TaskCosts.
    """

    def __init__(self, first: FusedModel, second: FusedModel, *, always: bool, fixed_costs: bool) -> None:
        self._models, self._always = (first, second), always
        self._fixed_costs, self._left_out = fixed_costs, 0  # mini-batches since the last fused one
        self.costs = TaskCosts({one.name: one.parameters for one in self._models}, fixed_costs)

    def plan(self, tokens: Mapping[str, Sequence[Sequence[int]]]) -> FusedPlan | None:
        """The plan of a mini-batch; None if one model after the other is about as fast.

        Args:
            tokens: of each model, by data-parallel rank, the tokens of each micro-batch.
        """
        from rlhfspec_mega.planning.pipeline.solver import QUICK_TASKS, solve  # imports numba: a third of a second

        first, second = (tokens[one.name] for one in self._models)
        beside = len(second) // len(first)
        makespan, one_by_one, tasks = 0.0, 0.0, []
        for place, batches in enumerate(first):
            problem = self._problem([batches], second[place * beside : (place + 1) * beside])
            found = solve(problem, tasks=QUICK_TASKS // len(first)).schedule
            makespan = max(makespan, found.makespan)
            one_by_one = max(one_by_one, sum(one.makespan for one in serial(problem)))
            if deadlock := find_deadlock(problem, found.orders):
                raise RunError(f"The plan of a fused pass is not valid. {deadlock}")
            tasks.append(self._rank_tasks(problem, found))
        plan = FusedPlan(tasks, makespan, one_by_one)
        self._left_out += 1
        if self._always or plan.gain >= MIN_GAIN or (self._left_out > LEARN_AFTER and not self._fixed_costs):
            self._left_out = 0
            return plan
        return None

    def _problem(self, *tokens: Sequence[Sequence[int]]) -> Problem:
        forward: list[Doubles] = []
        backward: list[Doubles] = []
        activation: list[Doubles] = []
        for one, replicas in zip(self._models, tokens, strict=True):
            counts = [np.array(batches, np.float64) for batches in replicas]
            forward.append(np.stack([self.costs.seconds(one.name, False, count) for count in counts]))
            backward.append(np.stack([self.costs.seconds(one.name, True, count) for count in counts]))
            activation.append(np.stack([np.outer(one.activation, count) for count in counts]))
        problem = opposed_pipelines([one.stages for one in self._models], forward, backward, activation)
        peaks = np.zeros(problem.devices)
        for alone in serial(problem):
            peaks[: len(alone.peaks)] += alone.peaks
        return Problem(problem.pipelines, tuple(peaks * (1 + 1e-9)))

    def _rank_tasks(self, problem: Problem, schedule: Schedule) -> list[list[RankTask]]:
        names = [self._models[one.model].name for one in problem.pipelines]
        return [
            [RankTask(names[task.pipeline], task.micro_batch, task.backward) for task in order]
            for order in schedule.orders
        ]


def compile_search() -> None:
    """Make the smallest plan, so that the functions of the search are compiled."""
    models = [FusedModel(name, 1, [1.0], [1.0]) for name in ("first", "second")]
    FusionPlanner(*models, always=True, fixed_costs=True).plan({one.name: [[1]] for one in models})
