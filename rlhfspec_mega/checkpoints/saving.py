"""Saves a checkpoint.

Check disk space, then write every rank's part, the driver's state, the manifest, and `latest`.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from rlhfspec_mega.checkpoints.directory import CheckpointDirectory, write_durably
from rlhfspec_mega.checkpoints.manifest import BadCheckpoint, Manifest
from rlhfspec_mega.config.output_dir import CHECKPOINTS
from rlhfspec_mega.errors import CheckpointError
from rlhfspec_mega.megatron.checkpoint_files import sum_file, sync
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.workers.model_group import ModelGroup

ACTOR, STATE_FILE = "actor", "state.json"
_WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}
_OPTIMIZER_BYTES = 12  # fp32 main weight and two moments
_MIB = 2**20

_logger = logging.getLogger(__name__)


def save(run_dir: Path, step: int, actor: ModelGroup, state: dict[str, Any], keep: int) -> Path:
    """Write `checkpoints/step_<step>`, make it the latest, and remove all but the newest `keep` complete ones.

    Args:
        step: finished steps.
        state: the driver's part, JSON.

    Raises:
        CheckpointError: no space, or a rank or the driver could not write. Nothing of this save is left; earlier
            checkpoints and the workers are unaffected, so the run may go on.
        RunError: a worker died.
    """
    directory = CheckpointDirectory(run_dir / CHECKPOINTS)
    try:
        directory.drop_unfinished()
        directory.drop_newer_than_latest()
        identity = actor.identity()
        _require_room(run_dir, directory, identity)
        partial = directory.begin(step)
        _write(partial, Manifest(step, identity, {}), actor, {"step": step, **state})
        directory.commit(step)
    except (CheckpointError, OSError) as error:
        directory.abandon(step)
        raise CheckpointError(
            f"{directory.path(step)} was not saved, those before it are untouched: {error}."
        ) from error
    try:
        directory.drop_unfinished()
        directory.keep_newest(keep)
    except OSError as error:
        _logger.warning(f"{directory.path(step)} was saved, but one before it could not be removed: {error}.")
    return directory.path(step)


def _write(partial: Path, manifest: Manifest, actor: ModelGroup, state: dict[str, Any]) -> None:
    (partial / ACTOR).mkdir()
    for name, file_sum in actor.save(partial / ACTOR).items():
        manifest.files[f"{ACTOR}/{name}"] = file_sum
    write_durably(partial / STATE_FILE, json.dumps(state))
    manifest.files[STATE_FILE] = sum_file(partial / STATE_FILE)
    _require_visible(partial, manifest)
    manifest.write(partial)
    sync(partial / ACTOR)
    sync(partial)


def _require_visible(partial: Path, manifest: Manifest) -> None:
    """Refuse a checkpoint whose parts lie on the local disks of several nodes: it could not be loaded."""
    try:
        manifest.check_sizes(partial)
    except BadCheckpoint as error:
        raise CheckpointError(
            f"what the actor's ranks wrote cannot be seen by the driver ({error}): output_dir must be on a file system "
            "that all nodes share"
        ) from None


def _require_room(run_dir: Path, directory: CheckpointDirectory, identity: dict[str, Any]) -> None:
    """Raise CheckpointError if the disk has too little space for it."""
    needed, free = _expected_size(directory, identity), shutil.disk_usage(run_dir).free
    if needed > free:
        raise CheckpointError(
            f"it needs about {needed / _MIB:.1f} MiB and {free / _MIB:.1f} MiB are free there: make room, or set a "
            "smaller trainer.keep_checkpoints"
        )


def _expected_size(directory: CheckpointDirectory, identity: dict[str, Any]) -> int:
    """Bytes of the previous checkpoint, else an estimate from weights and optimizer."""
    try:
        return Manifest.read(directory.path(directory.steps()[-1])).size
    except (IndexError, BadCheckpoint):
        shape = ModelShape(**{key: value for key, value in identity.items() if key != "dtype"})
        return shape.parameters * (_WEIGHT_BYTES[identity["dtype"]] + _OPTIMIZER_BYTES)
