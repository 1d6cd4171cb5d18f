"""Loads the newest good checkpoint: all files are verified before Megatron reads one; bad checkpoints are reported."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhfspec_mega.checkpoints.directory import CheckpointDirectory
from rlhfspec_mega.checkpoints.manifest import BadCheckpoint, Manifest
from rlhfspec_mega.checkpoints.saving import STATE_FILE, Models, identities_of, owner
from rlhfspec_mega.config.output_dir import CHECKPOINTS
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.megatron.checkpoint_files import first_damage
from rlhfspec_mega.planning.placement import ACTOR

_logger = logging.getLogger(__name__)


def load_latest(run_dir: Path, models: Models, warn: Callable[[str], None] = _logger.warning) -> dict[str, Any] | None:
    """Load the checkpoint that `latest` names, or the newest good one before it, into the models that learn.

    Bad ones are reported, and renamed step_<number>.bad once a good one is found.

    Args:
        warn: called with a sentence for every checkpoint that is skipped and for everything that cannot be restored.

    Returns the driver's state with "step", or None if there has never been a checkpoint.

    Raises:
        UserError: there are checkpoints, but none can be used.
        RunError: a worker failed to read files that had been verified.
    """
    directory = CheckpointDirectory(run_dir / CHECKPOINTS)
    directory.drop_unfinished()
    if not directory.steps() and not directory.set_aside():
        warn(f"{run_dir} holds no checkpoint yet: the run begins at step 0.")
        return None
    identity, latest, bad = owner(identities_of(models)), directory.latest(), dict[int, str]()
    _report_latest(directory, latest, warn)
    for step in reversed(directory.steps()):
        if latest is not None and step > latest:
            continue  # its save never returned
        path = directory.path(step)
        try:
            state = _verified_state(path, step, models, identity)
        except BadCheckpoint as error:
            bad[step] = str(error)
            warn(f"{path} cannot be used: {error}; the one before it is tried.")
            continue
        same_grids = [model.load(path / name) for name, model in models.items()]
        if not all(same_grids):
            warn(f"{path} was saved under other parallel sizes: the random generators start afresh from the seed.")
        for number in bad:
            directory.mark_bad(number)
        directory.point_to(step)
        return state
    raise _none_good(directory, bad)


def _report_latest(directory: CheckpointDirectory, latest: int | None, warn: Callable[[str], None]) -> None:
    if latest is None:
        warn(f"{directory.root / 'latest'} is missing or damaged: the newest checkpoint is tried.")
    elif latest not in directory.steps():
        warn(f"{directory.path(latest)}, the latest checkpoint, is missing: the one before it is tried.")


def _none_good(directory: CheckpointDirectory, bad: dict[int, str]) -> UserError:
    reasons = [f"step_{step}: {reason}" for step, reason in bad.items()]
    reasons += [f"{path.name} was found bad before" for path in directory.set_aside()]
    return UserError(
        f"{directory.root} holds no checkpoint that can be used ({'; '.join(reasons) or 'the latest is missing'}): put "
        "back a good copy, correct the options if they are another run's, or start another run with another name=."
    )


def _verified_state(path: Path, step: int, models: Models, identity: dict[str, Any]) -> dict[str, Any]:
    """The driver's state of a checkpoint whose files are all intact; raises BadCheckpoint."""
    manifest = Manifest.read(path)
    if manifest.step != step:
        raise BadCheckpoint(f"it is one of step {manifest.step} under another name")
    manifest.check_owner(identity)
    manifest.check_sizes(path)
    own = {name: file for name, file in manifest.files.items() if name == STATE_FILE}
    others = {name: file for name, file in manifest.files.items() if name != STATE_FILE}
    damage = first_damage(path, own) or models[ACTOR].first_damage(path, others)
    if damage is not None:
        raise BadCheckpoint(damage)
    return json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
