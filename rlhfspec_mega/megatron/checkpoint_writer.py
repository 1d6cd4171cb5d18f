"""Writes a Megatron distributed checkpoint in steps that all ranks finish or fail together.

Megatron's own `dist_checkpointing.save` (0.16) leaves the other ranks in a collective until its timeout when rank 0
cannot write `common.pt`, `.metadata` or `metadata.json`, and writes shards from forked processes that stay behind as
zombies after an error. Here torch's synchronous writer and one agreement per step make the same files.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.serialization import get_default_save_common_strategy
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,  # nothing public leads from Megatron's shards to torch's
    mcore_to_pyt_state_dict,
)
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from rlhfspec_mega.megatron.checkpoint_files import FileSum, sync_and_sum

T = TypeVar("T")
_FORMAT = CheckpointingConfig("torch_dist", 1)


class WriteFailed(Exception):
    """A step failed on some rank. Raised on all ranks, with the same message: rank and cause."""


@dataclass
class StagedState:
    """A sharded state that is ready to be written.

    Attributes:
        shards: this rank's shards, by name.
        common: what is the same on all ranks.
        failure: why it could not be copied; `write` reports it on all ranks.
    """

    shards: dict[str, Any]
    common: dict[str, Any]
    failure: Exception | None = None


def stage(state: dict[str, Any], copy: bool, validate: bool) -> StagedState:
    """Prepare a sharded state dict for `write`; collective over all ranks, inside `cuda_means_cpu`.

    Args:
        copy: copy everything to host memory, so that the model may change while the copy is written.
        validate: check that the shards of all ranks make up whole tensors, which need be done once for a model.
    """
    sharded, common = save_preprocess(state, validate_access_integrity=validate)
    shards, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    try:
        if copy:
            for pieces in shards.values():
                for piece in pieces:
                    if isinstance(piece.data, torch.Tensor):
                        piece.data = piece.data.detach().to("cpu", copy=True)
            common = deepcopy(common)
        return StagedState(shards, common)
    except Exception as error:  # e.g. out of memory; nothing may keep this rank from the collectives of `write`
        return StagedState({}, {}, error)


def write(staged: StagedState, directory: Path, group: dist.ProcessGroup) -> dict[str, FileSum]:
    """Write a staged state into an existing empty directory; collective over all ranks, in any thread.

    Returns the files that this rank accounts for, forced to disk and with checksums: the shards it wrote and, on rank
        0,
    all files that are not shards.

    Args:
        group: the ranks, over gloo, for nothing else at the same time.

    Raises:
        WriteFailed: on every rank, if one of them could not write (usually a full disk). Files may be left.
    """
    path = str(directory)

    def begin() -> dict[str, Any]:
        if staged.failure is not None:
            raise staged.failure
        get_default_save_common_strategy().save_common(staged.common, path)  # writes on rank 0 only
        return mcore_to_pyt_state_dict(staged.shards)

    _write_shards(_agreed(begin, group), path, group)
    # Last: this file tells Megatron that the directory is a checkpoint.
    _agreed(lambda: save_config(_FORMAT, path) if dist.get_rank() == 0 else None, group)
    return _agreed(lambda: sync_and_sum(directory, _own_files(directory)), group)


def write_beside(
    state: Callable[[], Mapping[str, torch.Tensor]] | None, directory: Path, name: str, group: dist.ProcessGroup
) -> dict[str, FileSum]:
    """Add a safetensors file to a written checkpoint, on the rank that has a state for it; collective over all ranks.

    Returns that rank's file by name, forced to disk and with a checksum; {} on the other ranks.

    Raises:
        WriteFailed: on every rank, if the state could not be built (e.g. out of memory) or written.
    """

    def step() -> dict[str, FileSum]:
        if state is None:
            return {}
        save_file({key: tensor.detach().contiguous() for key, tensor in state().items()}, directory / name)
        return sync_and_sum(directory, [name])

    return _agreed(step, group)


def _write_shards(shards: dict[str, Any], path: str, group: dist.ProcessGroup) -> None:
    # One writing thread: torch loses the errors of further ones.
    writer, planner = _ShardWriter(path, thread_count=1), MCoreSavePlanner(flatten_state_dict=False)
    try:
        dcp.save(shards, storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:  # torch raises it on every rank
        _log(error)
        rank, (cause, _) = min(error.failures.items())
        raise WriteFailed(_sentence(rank, cause)) from None


class _ShardWriter(dcp.FileSystemWriter):
    """Torch's writer, except that a failure names its cause: torch.save reports a full disk as a position error."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise _root_cause(error) from None


def _agreed(step: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Run a step that involves no other rank; raises WriteFailed on all ranks if it fails on any of them."""
    failure, result = None, None
    try:
        result = step()
    except Exception as error:
        _log(error)
        failure = _sentence(dist.get_rank(), _root_cause(error))
    failures: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(failures, failure, group=group)
    for found in failures:
        if found is not None:
            raise WriteFailed(found)
    return result  # type: ignore[return-value]


def _log(error: BaseException) -> None:
    # The worker's log may lie on the disk that is full, and nothing may keep this rank from the next collective.
    with contextlib.suppress(OSError):
        traceback.print_exception(error)


def _root_cause(error: BaseException) -> BaseException:
    """The operating system's error behind this one, if there is one."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


def _sentence(rank: int, error: BaseException) -> str:
    first_line = next(iter(str(error).strip().splitlines()), "")
    return f"actor rank {rank}: {type(error).__name__}: {first_line}"


def _own_files(directory: Path) -> list[str]:
    """Names of the files whose checksums this rank computes: torch names shards __<rank>_<number>.distcp."""
    rank = dist.get_rank()
    names = sorted(path.name for path in directory.iterdir())
    return [name for name in names if name.startswith(f"__{rank}_") or (rank == 0 and not name.startswith("__"))]
