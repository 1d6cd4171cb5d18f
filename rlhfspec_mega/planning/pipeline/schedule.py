"""A pipeline schedule: which task each device computes after which, its times, its memory, and whether it is valid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rlhfspec_mega.planning.pipeline.problem import Problem


class Task(NamedTuple):
    """The forward or the backward pass of a micro-batch on one stage of a pipeline."""

    pipeline: int
    stage: int
    micro_batch: int
    backward: bool


@dataclass(frozen=True)
class TimedTask:
    """A task of a device, with its predicted start and end in seconds."""

    task: Task
    start: float
    end: float


# Of each device, the tasks that it computes one after the other.
Orders = Sequence[Sequence[Task]]


@dataclass(frozen=True)
class Schedule:
    """An order of tasks on each device, and what is predicted of it.

    Attributes:
        tasks: of each device, in order.
        makespan: seconds from the first start to the last end.
        peaks: most bytes of live activations on each device.
    """

    tasks: tuple[tuple[TimedTask, ...], ...]
    makespan: float
    peaks: tuple[float, ...]

    @property
    def peak_memory(self) -> float:
        """Most bytes of live activations on any device."""
        return max(self.peaks)

    @property
    def orders(self) -> tuple[tuple[Task, ...], ...]:
        """Of each device, its tasks without their times."""
        return tuple(tuple(timed.task for timed in tasks) for tasks in self.tasks)


def predecessor(problem: Problem, task: Task) -> Task | None:
    """The task whose result a task needs: that of the stage before it, backward of the stage behind it."""
    last = problem.pipelines[task.pipeline].stages - 1
    if not task.backward:
        return task._replace(stage=task.stage - 1) if task.stage > 0 else None
    return task._replace(stage=task.stage + 1) if task.stage < last else task._replace(backward=False)


def duration(problem: Problem, task: Task) -> float:
    """Seconds that a task takes."""
    pipeline = problem.pipelines[task.pipeline]
    times = pipeline.backward if task.backward else pipeline.forward
    return float(times[task.stage, task.micro_batch])


def timed(problem: Problem, orders: Orders) -> Schedule:
    """The schedule in which every task starts as soon as its device and its predecessor have ended.

    Raises ValueError if the orders are not of all tasks, each on its device, or if they wait for each other.
    """
    _check_complete(problem, orders)
    ends: dict[Task, float] = {}
    found: list[list[TimedTask]] = [[] for _ in orders]
    waiting = set(range(len(orders)))
    while waiting:
        before = len(ends)
        for device in sorted(waiting):
            done = found[device]
            for task in orders[device][len(done) :]:
                needs = predecessor(problem, task)
                if needs is not None and needs not in ends:
                    break
                start = max(done[-1].end if done else 0.0, ends[needs] if needs is not None else 0.0)
                ends[task] = start + duration(problem, task)
                done.append(TimedTask(task, start, ends[task]))
            else:
                waiting.discard(device)
        if len(ends) == before:
            stuck = {device: orders[device][len(found[device])] for device in sorted(waiting)}
            raise ValueError(f"tasks wait for each other: {stuck}")
    tasks = tuple(map(tuple, found))
    return Schedule(tasks, max(ends.values()), tuple(_peak(problem, order) for order in orders))


def _check_complete(problem: Problem, orders: Orders) -> None:
    for device, order in enumerate(orders):
        wanted = {
            Task(pipeline, stage, micro_batch, backward)
            for pipeline, stage in problem.hosted[device]
            for micro_batch in range(problem.pipelines[pipeline].micro_batches)
            for backward in (False, True)
        }
        if len(order) != len(wanted) or set(order) != wanted:
            raise ValueError(f"device {device} has other tasks than its stages")


def _peak(problem: Problem, order: Sequence[Task]) -> float:
    """Most bytes of live activations: from the start of a forward to the end of its backward."""
    live = peak = 0.0
    for task in order:
        size = float(problem.pipelines[task.pipeline].activation[task.stage, task.micro_batch])
        live += -size if task.backward else size
        peak = max(peak, live)
    return peak
