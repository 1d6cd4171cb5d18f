"""Gathers an optimizer's shards on the first data-parallel rank for a checkpoint, in host memory.

Megatron's own gather (`DistributedOptimizer.get_parameter_state_dp_zero`, 0.16) needs three times the memory: beside
the whole tensors it holds all shards once more and, for each state, what was received three times. Here each piece of a
shard goes straight to its place in the whole tensors. These are one for each parameter: torch copies views of a larger
tensor when it writes them, and keeps copies until the file is closed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

STATES = ("param", "exp_avg", "exp_avg_sq")

Place = tuple[int, int, int, int]  # numbers of Megatron's buffer and of a parameter in it; start and end therein


class OptimizerGather:
    """Gathers the states of one of Megatron's distributed optimizers once: `reserve`, `gather`, then `whole`.

    Args:
        optimizer: tells where in its buffers this rank's pieces belong.
        shards: these pieces by parameter and state: flat, fp32, on any device.
        group: the data-parallel ranks, over gloo, for nothing else at the same time.
    """

    def __init__(
        self, optimizer: Any, shards: Mapping[Any, Mapping[str, torch.Tensor]], group: dist.ProcessGroup
    ) -> None:
        self._optimizer, self._shards, self._group = optimizer, shards, group
        self._is_first = group.rank() == 0
        self._whole: list[list[dict[str, torch.Tensor]]] = []  # by buffer, parameter and state, on the first rank

    def reserve(self) -> None:
        """Allocate the whole tensors on the first rank; no rank waits for another.

        Raises RuntimeError, which is torch's error for it, if memory runs out.
        """
        if self._is_first:
            self._whole = [
                [
                    {state: torch.zeros(end - start, dtype=torch.float32) for state in STATES}
                    for start, end, _ in buffer.param_index_map.values()
                ]
                for buffer in self._optimizer.buffers
            ]

    def gather(self) -> None:
        """Fill the whole tensors; collective over the group. Raises RuntimeError if a peer cannot be reached."""
        mine = list(self._places())
        everyone: list[Any] | None = [None] * self._group.size() if self._is_first else None
        dist.gather_object([place for _, place in mine], everyone, group=self._group, group_dst=0)
        for parameter, place in mine:
            for state in STATES:
                piece = self._shards[parameter][state].detach()
                if self._is_first:
                    self._part(state, place).copy_(piece)
                else:
                    dist.send(piece.cpu(), group=self._group, group_dst=0)
        for rank in range(1, len(everyone or ())):
            for place in everyone[rank]:  # type: ignore[index]  # the order in which that rank sends
                for state in STATES:
                    dist.recv(self._part(state, place), group=self._group, group_src=rank)

    def whole(self, **_: Any) -> dict[int, Any] | None:
        """What was gathered, as `get_parameter_state_dp_zero` returns it; None on all ranks but the first."""
        if not self._is_first:
            return None
        found: dict[int, Any] = {}
        for index, (buffer, tensors) in enumerate(zip(self._optimizer.buffers, self._whole, strict=True)):
            starts = [start for start, _, _ in buffer.param_index_map.values()]
            (dtype,) = self._optimizer.gbuf_ranges[index]
            found[index] = {
                dtype: {
                    state: _Buffer({start: one[state] for start, one in zip(starts, tensors, strict=True)})
                    for state in STATES
                }
            }
        return found

    def _places(self) -> Iterator[tuple[Any, Place]]:
        """This rank's pieces: the parameter, and where its piece belongs."""
        for index, ranges in enumerate(self._optimizer.gbuf_ranges):
            numbers = {
                parameter: number for number, parameter in enumerate(self._optimizer.buffers[index].param_index_map)
            }
            (of_buckets,) = ranges.values()
            for of_bucket in of_buckets:
                for parameter, of_parameter in of_bucket["param_map"].items():
                    piece = of_parameter["param"]
                    yield parameter, (index, numbers[parameter], piece.start, piece.end)

    def _part(self, state: str, place: Place) -> torch.Tensor:
        buffer, parameter, start, end = place
        return self._whole[buffer][parameter][state][start:end]


class _Buffer:
    """In place of a tensor as large as a buffer: its parts are tensors of their own, by their starts."""

    def __init__(self, parts: Mapping[int, torch.Tensor]) -> None:
        self._parts = parts

    def __getitem__(self, where: slice) -> torch.Tensor:
        return self._parts[where.start]
