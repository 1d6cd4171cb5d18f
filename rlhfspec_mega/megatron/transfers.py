"""Receives and sends of a fused pass; what fails in one of them names the task and both ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.megatron.channels import Channels, Neighbour
from rlhfspec_mega.planning.pipeline.rank_task import RankTask


class Transfer(NamedTuple):
    """A transfer under way; its tensor must live until it has ended."""

    task: RankTask
    peer: Neighbour
    tensor: torch.Tensor
    work: Any


class Transfers:
    """The transfers of this rank's tasks.

    Args:
        channels: by model.
        stages: this rank's pipeline stage, by model.
    """

    def __init__(self, channels: Mapping[str, Channels], stages: Mapping[str, int]) -> None:
        self._channels, self._stages = channels, stages
        self._timeout = max(one.timeout for one in channels.values())
        self._sends: dict[RankTask, Transfer] = {}

    def receive(self, task: RankTask, buffer: Callable[[int], torch.Tensor]) -> Transfer | None:
        """Post the receive of what a task needs; None if it needs nothing of another rank.

        Args:
            buffer: makes the tensor for a micro-batch.
        """
        source = self._source(task)
        return None if source is None else self._start(dist.irecv, task, buffer(task.micro_batch), source)

    def arrived(self, transfer: Transfer) -> torch.Tensor:
        """Wait for a receive. NCCL waits on the stream, and its watchdog ends the process after the timeout."""
        self._wait(transfer)
        task = transfer.task
        if task.backward:  # the gradient has come, so the activations have: the send only has to be told
            sent = self._sends.pop(task._replace(backward=False), None)
            if sent is not None:
                self._wait(sent)
        return transfer.tensor

    def send(self, task: RankTask, result: torch.Tensor | None) -> None:
        """Send a task's result to where it is needed, without waiting."""
        channels = self._channels[task.model]
        target = channels.before if task.backward else channels.behind
        if target is None or result is None:
            return
        self._sends[task] = self._start(dist.isend, task, result.detach().contiguous(), target)
        if result.is_cuda:  # gloo calls a send completed only after a wait for it
            self._sends = {of: one for of, one in self._sends.items() if not one.work.is_completed()}

    def wait_for_sends(self) -> None:
        """Wait for all sends."""
        for one in self._sends.values():
            self._wait(one)
        self._sends.clear()

    def _source(self, task: RankTask) -> Neighbour | None:
        channels = self._channels[task.model]
        return channels.behind if task.backward else channels.before

    def _start(self, operation: Any, task: RankTask, tensor: torch.Tensor, peer: Neighbour) -> Transfer:
        group = peer.gradients if task.backward else peer.activations
        with self._named(task, peer):
            # In a batch of one: alone, NCCL would connect the two ranks anew, at the first use.
            work = dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer.rank, group)])[0]
        return Transfer(task, peer, tensor, work)

    def _wait(self, transfer: Transfer) -> None:
        with self._named(transfer.task, transfer.peer):
            transfer.work.wait(self._timeout)

    @contextmanager
    def _named(self, task: RankTask, peer: Neighbour) -> Iterator[None]:
        """Context in which a failure becomes a RunError that names the task and both ends."""
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RunError):
                raise
            what, why = "backward" if task.backward else "forward", str(error).strip().splitlines()[0]
            raise RunError(
                f"The {what} of the {task.model}'s micro-batch {task.micro_batch} on stage {self._stages[task.model]} "
                f"(rank {dist.get_rank()}) waited {time.monotonic() - began:.0f} s for rank {peer.rank}: {why}"
            ) from error
