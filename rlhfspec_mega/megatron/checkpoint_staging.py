"""What a checkpoint holds of a model, copied to host memory in the moment of the save and put together later.

A save stops training only for the copies: of the weights, and of this rank's own shards of the optimizer. To gather
these shards over the data-parallel ranks into whole tensors takes several times as long; any thread may do that while
the model trains on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.process_groups_config import ProcessGroupCollection

from rlhfspec_mega.megatron import random_state
from rlhfspec_mega.megatron.adamw_fixes import inner_optimizers
from rlhfspec_mega.megatron.build import unwrap
from rlhfspec_mega.megatron.checkpoint_gather import STATES, OptimizerGather
from rlhfspec_mega.megatron.groups import saving

# The default (model-space) sharding of the optimizer fails in Megatron 0.16 and the DP one does not load in fp32.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}
# The first data-parallel rank alone has the optimizer's whole tensors, and writes them (checkpoint_gather).
_GATHERED = {"distrib_optim_fully_reshardable_mem_efficient": True}

Keep = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class StagedState:
    """What `write` needs of a model: it calls `reserve`, `gather` and `assemble` once, in any thread.

    Attributes:
        gathers: of the optimizers behind the model's one.
        assemble: builds the sharded state dict from what was gathered; no rank waits for another.
        validate: check that the shards of all ranks make up whole tensors, which need be done once for a model.
        failure: why this rank could not stage its part.
    """

    gathers: Sequence[OptimizerGather]
    assemble: Callable[[], dict[str, Any]]
    validate: bool
    failure: Exception | None = None

    def reserve(self) -> None:
        """Allocate what `gather` fills; no rank waits for another. Raises what kept this rank from its part."""
        if self.failure is not None:
            raise self.failure
        for one in self.gathers:
            one.reserve()

    def gather(self) -> None:
        """Gather the optimizer's shards; collective over the data-parallel ranks, all of which have reserved."""
        for one in self.gathers:
            one.gather()


class Staging:
    """Stages the states of one model, one at a time; the host memory of the copies is used again.

    Attributes:
        validated: a state was written whose shards made up whole tensors; the same on all ranks.
    """

    def __init__(self, chunks: Sequence[Any], optimizer: Any, scheduler: Any, groups: ProcessGroupCollection) -> None:
        self._chunks, self._optimizer, self._scheduler, self._groups = chunks, optimizer, scheduler, groups
        self._buffers = _HostBuffers()
        self.validated = False

    def stage(self, copy: bool, data_group: dist.ProcessGroup) -> StagedState:
        """Model, optimizer, schedule and random state of now; no rank waits for another.

        Args:
            copy: copy them, so that the model may change before and while they are written.
            data_group: the data-parallel ranks, over gloo, for nothing else at the same time.
        """
        try:
            gathers, assemble = self._stage(self._buffers.restarted() if copy else _as_it_is, data_group)
        except Exception as error:  # e.g. out of memory; nothing may keep this rank from the collectives of `write`
            return StagedState((), dict, not self.validated, error)
        return StagedState(gathers, assemble, not self.validated)

    def _stage(
        self, keep: Keep, data_group: dist.ProcessGroup
    ) -> tuple[list[OptimizerGather], Callable[[], dict[str, Any]]]:
        models = sharded_models(self._chunks, self._groups)
        optimizer, gathers = _snapshot(self._optimizer, data_group, keep)
        weights = [
            (shard, keep(shard.data))
            for shard in nested_values(models)
            if torch.is_tensor(shard.data) and is_main_replica(shard.replica_id)  # no other one is written
        ]
        state = {
            "scheduler": self._scheduler.state_dict(),
            "random_state": random_state.sharded_random_state(self._groups),
            "grid": random_state.grid(self._groups),
            "content_metadata": dict(METADATA),
        }

        def assemble() -> dict[str, Any]:
            # First, because Megatron finds a parameter's shard by the parameter itself.
            of_optimizer = optimizer.sharded_state_dict(models, metadata=METADATA | _GATHERED)
            for shard, data in weights:
                shard.data = data
            return {**models, "optimizer": of_optimizer, **state}

        return gathers, assemble


def sharded_models(chunks: Sequence[Any], groups: ProcessGroupCollection) -> dict[str, Any]:
    """The sharded state dicts of a model's chunks, by the names that they have in a checkpoint."""
    states = {}
    for index, chunk in enumerate(chunks):
        with saving(groups):
            states[name_of(index, chunks)] = unwrap(chunk).sharded_state_dict(
                metadata=METADATA | {"dp_cp_group": groups.dp_cp}
            )
    return states


def name_of(index: int, chunks: Sequence[Any]) -> str:
    """A chunk's name in a checkpoint."""
    return "model" if len(chunks) == 1 else f"model{index}"


def _snapshot(optimizer: Any, data_group: dist.ProcessGroup, keep: Keep) -> tuple[Any, list[OptimizerGather]]:
    """An optimizer like this one whose state stays as it is now, for `sharded_state_dict` alone, after the gathers."""
    snapshots, gathers = [], []
    for part in inner_optimizers(optimizer):
        snapshot = copy(part)
        shards = {
            parameter: {state: keep(tensor) for state, tensor in _states(part, parameter).items()}
            for parameter in part.model_param_group_index_map
        }
        settings = deepcopy(part.state_dict())
        snapshot.state_dict = lambda settings=settings: settings
        gathers.append(OptimizerGather(part, shards, data_group))
        snapshot.get_parameter_state_dp_zero = gathers[-1].whole
        snapshots.append(snapshot)
    if snapshots and not hasattr(optimizer, "chained_optimizers"):
        return snapshots[0], gathers
    chain = copy(optimizer)
    chain.chained_optimizers = snapshots
    return chain, gathers


def _states(part: Any, parameter: Any) -> dict[str, torch.Tensor]:
    found = part._get_main_param_and_optimizer_states(parameter)
    return {state: found[state] for state in STATES}


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _HostBuffers:
    """Copies tensors to host memory that is kept from save to save: fresh memory takes several times as long."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._next = 0

    def restarted(self) -> Keep:
        """Overwrite from the first buffer on."""
        self._next = 0
        return self._copy

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._next == len(self._buffers):
            self._buffers.append(torch.empty(0))
        buffer = self._buffers[self._next]
        if buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            # Pinned, or the copy from a GPU would go through yet another buffer.
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
            self._buffers[self._next] = buffer
        self._next += 1
        return buffer.copy_(tensor.detach())
