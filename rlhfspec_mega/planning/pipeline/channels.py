"""Whether ranks that compute a schedule can wait for each other for ever, given how NCCL's channels work.

On a communicator operations take place in the order in which each side posted them: a receive behind a send that its
peer has not reached yet waits for it. So which transfers share a communicator decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from rlhfspec_mega.planning.pipeline.problem import Problem
from rlhfspec_mega.planning.pipeline.schedule import Orders, Task, predecessor


@dataclass(frozen=True)
class Transfer:
    """The result of `task` on its way from one device to another."""

    task: Task
    model: int
    source: int
    target: int

    @property
    def pair(self) -> tuple[int, int]:
        """The two devices."""
        return min(self.source, self.target), max(self.source, self.target)


# What a transfer's communicator is.
Channel = Callable[[Transfer], Hashable]


def pair_model_direction(transfer: Transfer) -> Hashable:
    """A communicator for each pair of neighbours, model and direction, as the executor has them."""
    return (*transfer.pair, transfer.model, transfer.task.backward)


def incoming(problem: Problem, task: Task) -> Transfer | None:
    """The transfer that a task waits for; None if it needs nothing of another device."""
    needs = predecessor(problem, task)
    if needs is None or needs.stage == task.stage:
        return None
    pipeline = problem.pipelines[task.pipeline]
    return Transfer(needs, pipeline.model, pipeline.devices[needs.stage], pipeline.devices[task.stage])


def outgoing(problem: Problem, task: Task) -> Transfer | None:
    """The transfer of a task's result; None if no other device needs it."""
    pipeline = problem.pipelines[task.pipeline]
    stage = task.stage + (-1 if task.backward else 1)
    if not 0 <= stage < pipeline.stages:
        return None
    return Transfer(task, pipeline.model, pipeline.devices[task.stage], pipeline.devices[stage])


def find_deadlock(
    problem: Problem, orders: Orders, channel: Channel = pair_model_direction, ahead: int = 1
) -> str | None:
    """A sentence that names the tasks that wait for each other for ever; None if the schedule ends.

    Args:
        ahead: receives are posted so many tasks before the one that needs them.
    """
    ranks = [_Rank(problem, order, ahead) for order in orders]
    queues: dict[tuple[int, Hashable], deque[Transfer]] = {}
    arrived: set[Transfer] = set()
    moved = True
    while moved:
        moved = False
        for device, rank in enumerate(ranks):
            for transfer in rank.post(arrived):
                queues.setdefault((device, channel(transfer)), deque()).append(transfer)
                moved = True
        for (_, key), queue in queues.items():
            while queue:
                source, target = (queues.get((one, key)) for one in (queue[0].source, queue[0].target))
                if not source or not target or source[0] != target[0]:
                    break
                arrived.add(source.popleft())
                target.popleft()
                moved = True
    waiting = {device: rank.waits_for for device, rank in enumerate(ranks) if rank.waits_for is not None}
    if not waiting:
        return None
    return "These devices wait for ever: " + ", ".join(f"{device} for {task}" for device, task in waiting.items()) + "."


class _Rank:
    """A device on its way through its tasks."""

    def __init__(self, problem: Problem, order: Sequence[Task], ahead: int) -> None:
        self._problem, self._order, self._ahead = problem, order, ahead
        self._done = self._posted = 0

    @property
    def waits_for(self) -> Task | None:
        """The task that the device cannot begin; None at the end."""
        return self._order[self._done] if self._done < len(self._order) else None

    def post(self, arrived: set[Transfer]) -> list[Transfer]:
        """Compute as many tasks as possible; returns the transfers that are posted meanwhile, in order."""
        found: list[Transfer] = []
        while self._done < len(self._order):
            while self._posted < min(self._done + 1 + self._ahead, len(self._order)):
                needed = incoming(self._problem, self._order[self._posted])
                found += [needed] if needed is not None else []
                self._posted += 1
            needed = incoming(self._problem, self._order[self._done])
            if needed is not None and needed not in arrived:
                break
            sent = outgoing(self._problem, self._order[self._done])
            found += [sent] if sent is not None else []
            self._done += 1
        return found
