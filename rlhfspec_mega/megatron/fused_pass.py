"""Executes a fused pipeline schedule on one rank: tasks of one or two models in the order of a plan.

RLHFuse (arXiv 2409.13221, section 5) describes such schedules; planning.pipeline makes them. A task waits for what it
needs, computes by Megatron's forward or backward step, and sends its result without waiting. The receive of the next
task is posted before a task computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.megatron.channels import Channels, Neighbour, Transfers
from rlhfspec_mega.megatron.gradient_pass import GradientPass
from rlhfspec_mega.planning.pipeline.rank_task import RankTask, TaskTime


class _Receive(NamedTuple):
    tensor: torch.Tensor
    work: Any
    source: Neighbour


class FusedPass:
    """Runs the tasks of this rank.

    Args:
        passes, channels: by name of the model.
        computed: called after each task with the task and when it began (time.perf_counter); benchmarks impose
            durations by it.
    """

    def __init__(
        self,
        passes: Mapping[str, GradientPass],
        channels: Mapping[str, Channels],
        computed: Callable[[RankTask, float], None] = lambda task, began: None,
    ) -> None:
        self._passes, self._channels, self._computed = passes, channels, computed
        self._transfers = Transfers(max(one.timeout for one in channels.values()))

    def run(self, tasks: Sequence[RankTask]) -> list[TaskTime]:
        """Compute all tasks in order; the passes are to be ended afterwards, in the same order on all ranks.

        Raises RunError, which names the task and both ends, if what a task needs does not come.
        """
        times: list[TaskTime] = []
        following = self._receive(tasks[0]) if tasks else None
        for place, task in enumerate(tasks):
            given, following = following, None
            if place + 1 < len(tasks):
                following = self._receive(tasks[place + 1])
            tensor = self._arrived(task, given)
            self._settle()  # times of tasks, from which plans are made, hold no waits
            began, at = time.perf_counter(), time.time()
            result = self._compute(task, tensor)
            self._settle()
            self._computed(task, began)
            times.append(TaskTime(task, at, time.perf_counter() - began))
            self._send(task, result)
        self._wait_for_sends(tasks)
        return times

    def _compute(self, task: RankTask, given: torch.Tensor | None) -> torch.Tensor | None:
        one = self._passes[task.model]
        return one.backward(task.micro_batch, given) if task.backward else one.forward(task.micro_batch, given)

    def _settle(self) -> None:
        """On a GPU, wait until all that was begun on the stream has ended."""
        if any(one.device.type == "cuda" for one in self._passes.values()):
            torch.cuda.current_stream().synchronize()

    def _source(self, task: RankTask) -> Neighbour | None:
        channels = self._channels[task.model]
        return channels.behind if task.backward else channels.before

    def _receive(self, task: RankTask) -> _Receive | None:
        """Post the receive of what a task needs of another rank."""
        source = self._source(task)
        if source is None:
            return None
        tensor = self._passes[task.model].buffer(task.micro_batch)
        group = source.gradients if task.backward else source.activations
        with self._named(task, source):
            return _Receive(tensor, dist.irecv(tensor, source.rank, group=group), source)

    def _arrived(self, task: RankTask, receive: _Receive | None) -> torch.Tensor | None:
        if receive is None:
            return None
        with self._named(task, receive.source):
            self._transfers.wait(receive.work)
        return receive.tensor

    def _send(self, task: RankTask, result: torch.Tensor | None) -> None:
        channels = self._channels[task.model]
        target = channels.before if task.backward else channels.behind
        if target is not None and result is not None:
            with self._named(task, target):
                self._transfers.send(result, target, target.gradients if task.backward else target.activations)

    def _wait_for_sends(self, tasks: Sequence[RankTask]) -> None:
        try:
            self._transfers.wait_for_sends()
        except RuntimeError as error:
            raise RunError(
                f"Rank {dist.get_rank()} could not send all results of {len(tasks)} tasks: {error}"
            ) from None

    def _named(self, task: RankTask, peer: Neighbour) -> _Named:
        return _Named(self._passes[task.model], task, peer)


class _Named:
    """Context of a transfer: what fails in it names the task and both ends."""

    def __init__(self, one: GradientPass, task: RankTask, peer: Neighbour) -> None:
        self._pass, self._task, self._peer = one, task, peer

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, RunError):
            task, what = self._task, "backward" if self._task.backward else "forward"
            waited, why = time.monotonic() - self._began, str(error).strip().splitlines()[0]
            raise RunError(
                f"The {what} of the {task.model}'s micro-batch {task.micro_batch} on stage "
                f"{self._pass.groups.pp.rank()} (rank {dist.get_rank()}) waited {waited:.0f} s for rank "
                f"{self._peer.rank}: {why}"
            ) from error
