"""Writes a Megatron distributed checkpoint in steps that all ranks finish or fail together.

Megatron's own `dist_checkpointing.save` (0.16) leaves the other ranks in a collective until its timeout when rank 0
cannot write `common.pt`, `.metadata` or `metadata.json`, and writes shards from forked processes that stay behind as
zombies after an error. Here torch's synchronous writer and one agreement per step make the same files.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.serialization import get_default_save_common_strategy
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,  # nothing public leads from Megatron's shards to torch's
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import validate_sharding_integrity
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from rlhfspec_mega.megatron.checkpoint_files import FileSum, sync_and_sum
from rlhfspec_mega.megatron.checkpoint_staging import StagedState
from rlhfspec_mega.megatron.saving_groups import SavingGroups

T = TypeVar("T")
_FORMAT = CheckpointingConfig("torch_dist", 1)


class WriteFailed(Exception):
    """A step failed on some rank: rank and cause. Raised on all ranks, and unless a collective failed with one message.

    If a collective failed in the last agreement, ranks that had passed it already have succeeded.
    """


def write(staged: StagedState, directory: Path, groups: SavingGroups) -> dict[str, FileSum]:
    """Write a staged state into an existing empty directory; collective over all ranks, in any thread.

    Returns the files that this rank accounts for, forced to disk and with checksums: the shards it wrote and, on rank
    0, all files that are not shards.

    Args:
        groups: are closed if a collective fails.

    Raises:
        WriteFailed: if a rank could not write (usually a full disk) or could not be reached. Files may be left.
    """
    with _closed_by_errors(groups):
        return _write(staged, directory, groups.everyone)


def _write(staged: StagedState, directory: Path, group: dist.ProcessGroup) -> dict[str, FileSum]:
    path = str(directory)
    _agreed(staged.reserve, group)  # before any rank waits for the shards of another
    staged.gather()
    sharded, common = _agreed(lambda: save_preprocess(staged.assemble(), validate_access_integrity=False), group)
    if staged.validate:
        _require_whole_tensors(sharded, group)

    def begin() -> dict[str, Any]:
        get_default_save_common_strategy().save_common(common, path)  # writes on rank 0 only
        shards, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
        return mcore_to_pyt_state_dict(shards)

    _write_shards(_agreed(begin, group), path, group)
    # Last: this file tells Megatron that the directory is a checkpoint.
    _agreed(lambda: save_config(_FORMAT, path) if dist.get_rank() == 0 else None, group)
    return _agreed(lambda: sync_and_sum(directory, _own_files(directory)), group)


def write_beside(
    state: Callable[[], Mapping[str, torch.Tensor]] | None, directory: Path, name: str, groups: SavingGroups
) -> dict[str, FileSum]:
    """Add a safetensors file to a written checkpoint, on the rank that has a state for it; collective over all ranks.

    Returns that rank's file by name, forced to disk and with a checksum; {} on the other ranks.

    Raises:
        WriteFailed: if the state could not be built (e.g. out of memory) or written, or a rank could not be reached.
    """

    def step() -> dict[str, FileSum]:
        if state is None:
            return {}
        save_file({key: tensor.detach().contiguous() for key, tensor in state().items()}, directory / name)
        return sync_and_sum(directory, [name])

    with _closed_by_errors(groups):
        return _agreed(step, groups.everyone)


@contextlib.contextmanager
def _closed_by_errors(groups: SavingGroups) -> Iterator[None]:
    """Whatever is not agreed on leaves ranks waiting for this one: let them fail at once, too."""
    try:
        yield
    except WriteFailed:
        raise
    except Exception as error:
        _log(error)
        groups.close()
        raise WriteFailed(_sentence(dist.get_rank(), _root_cause(error))) from None


def _require_whole_tensors(sharded: dict[str, Any], group: dist.ProcessGroup) -> None:
    """Raise WriteFailed on all ranks unless the shards of all of them make up whole tensors, each part once."""
    shards = _agreed(lambda: [shard.without_data() for shard in nested_values(sharded)], group)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, shards, group=group)
    _agreed(lambda: validate_sharding_integrity(everyone), group)  # on rank 0


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
