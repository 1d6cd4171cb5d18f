"""Executes a fused pipeline schedule on one rank: tasks of one or two models in the order of a plan.

RLHFuse (arXiv 2409.13221) describes such schedules; planning.pipeline makes them. A task waits for what it
needs, computes by Megatron's forward or backward step, and sends its result without waiting. The receive of the next
task is posted before a task computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from rlhfspec_mega.megatron.channels import Channels
from rlhfspec_mega.megatron.gradient_pass import GradientPass
from rlhfspec_mega.megatron.transfers import Transfer, Transfers
from rlhfspec_mega.planning.pipeline.rank_task import RankTask, TaskTime


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
        self._passes, self._computed = passes, computed
        own = {name: channels[name] for name in passes}
        self._transfers = Transfers(own, {name: one.groups.pp.rank() for name, one in passes.items()})
        self._on_gpu = any(one.device.type == "cuda" for one in passes.values())

    def run(self, tasks: Sequence[RankTask]) -> list[TaskTime]:
        """Compute all tasks in order; the passes are to be ended afterwards, in the same order on all ranks.

        Raises RunError, which names the task and both ends, if a transfer fails or does not come.
        """
        times: list[TaskTime] = []
        following = self._post(tasks[0]) if tasks else None
        for place, task in enumerate(tasks):
            given, following = following, self._post(tasks[place + 1]) if place + 1 < len(tasks) else None
            tensor = self._transfers.arrived(given) if given is not None else None
            self._settle()  # times of tasks, from which plans are made, hold no waits
            began, at = time.perf_counter(), time.time()
            result = self._compute(task, tensor)
            self._settle()
            self._computed(task, began)
            times.append(TaskTime(task, at, time.perf_counter() - began))
            self._transfers.send(task, result)
        self._transfers.wait_for_sends()
        return times

    def _post(self, task: RankTask) -> Transfer | None:
        return self._transfers.receive(task, self._passes[task.model].buffer)

    def _compute(self, task: RankTask, given: torch.Tensor | None) -> torch.Tensor | None:
        one = self._passes[task.model]
        return one.backward(task.micro_batch, given) if task.backward else one.forward(task.micro_batch, given)

    def _settle(self) -> None:
        """On a GPU, wait until all that was begun on the stream has ended."""
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
