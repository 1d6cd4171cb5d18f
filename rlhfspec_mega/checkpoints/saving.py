"""Saves checkpoints, in the foreground or while the run goes on.

Check disk space, then write every rank's part, the driver's state, the manifest, and `latest`.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhfspec_mega.checkpoints.directory import CheckpointDirectory, write_durably
from rlhfspec_mega.checkpoints.manifest import BadCheckpoint, Manifest
from rlhfspec_mega.config.output_dir import CHECKPOINTS
from rlhfspec_mega.errors import CheckpointError, RunError
from rlhfspec_mega.megatron.checkpoint_files import FileSum, sum_file, sync
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.memory import checkpoint_bytes
from rlhfspec_mega.planning.placement import ACTOR
from rlhfspec_mega.workers.model_group import ModelGroup

STATE_FILE = "state.json"
_MIB = 2**20
_POLL_SECONDS = 0.01

Models = Mapping[str, ModelGroup]

_logger = logging.getLogger(__name__)


def save(run_dir: Path, step: int, models: Models, state: dict[str, Any], keep: int) -> Path:
    """Write `checkpoints/step_<step>`, make it the latest, and remove all but the newest `keep` complete ones.

    Args:
        step: finished steps.
        models: those that learn, by name.
        state: the driver's part, JSON.

    Raises:
        CheckpointError: no space, or a rank or the driver could not write. Nothing of this save is left; earlier
            checkpoints and the workers are unaffected, so the run may go on.
        RunError: a worker died.
    """
    saver = Saver(run_dir, keep, background=False)
    saver.start(step, models, state)
    return CheckpointDirectory(run_dir / CHECKPOINTS).path(step)


def identities_of(models: Models) -> dict[str, dict[str, Any]]:
    """Precision and shape of each model, which a checkpoint must have in common with them to be loaded."""
    return {name: model.identity() for name, model in models.items()}


def owner(identities: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What a manifest says of the models: the actor's precision and shape, and the others' under their names."""
    return identities[ACTOR] | {name: identity for name, identity in identities.items() if name != ACTOR}


@dataclass
class _Save:
    """A save that has begun: the driver's part is still to be written and all of it to be committed.

    Attributes:
        state: the driver's part as text, of the moment when the ranks copied theirs.
        commit: the end of the save, in the background; None while ranks are writing.
    """

    step: int
    identity: dict[str, Any]
    state: str
    commit: Future[None] | None = None


class Saver:
    """Saves the checkpoints of a run, one at a time.

    In the background, `start` returns when every rank has copied its part to host memory; threads of the ranks write
    it, and a thread of the driver commits it with one rename once all ranks are done.

    Args:
        keep: newest complete checkpoints that are kept.
    """

    def __init__(self, run_dir: Path, keep: int, background: bool) -> None:
        self._run_dir, self._keep, self._background = run_dir, keep, background
        self._directory = CheckpointDirectory(run_dir / CHECKPOINTS)
        self._save: _Save | None = None
        self._identities: dict[str, dict[str, Any]] = {}  # the same in every save
        self._thread = ThreadPoolExecutor(1, "checkpoint")

    def start(self, step: int, models: Models, state: dict[str, Any]) -> None:
        """Begin to write `checkpoints/step_<step>`; the one before must have ended (see `wait`).

        Raises CheckpointError and RunError as `save` does.
        """
        assert self._save is None
        with self._undone_if_it_fails(step):
            self._directory.drop_unfinished()
            self._directory.drop_newer_than_latest()
            self._identities = self._identities or identities_of(models)
            _require_room(self._run_dir, self._directory, self._identities)
            partial = self._directory.begin(step)
            self._save = _Save(step, owner(self._identities), json.dumps({"step": step, **state}))
            for name, model in models.items():
                (partial / name).mkdir()
                model.start_save(partial / name, self._background)
        if not self._background:
            self.wait(models, deadline=math.inf)  # the ranks have written; only the commit is left

    def poll(self, models: Models) -> bool:
        """Whether no save is under way any more; commits it if all ranks are done. Raises as `start`."""
        save = self._save
        if save is None:
            return True
        with self._undone_if_it_fails(save.step):
            if save.commit is None and (files := _saved(models)) is not None:
                save.commit = self._thread.submit(self._commit, save, files)
            if save.commit is None or not save.commit.done():
                return False
            save.commit.result()
        self._save = None
        return True

    def wait(self, models: Models, deadline: float) -> None:
        """Wait until no save is under way.

        Args:
            deadline: longest wait in seconds in which the files do not grow: a slow disk does no harm.

        Raises:
            CheckpointError, RunError: as `start`, or RunError if the deadline passes.
        """
        begin, written = time.monotonic(), 0
        while not self.poll(models):
            if time.monotonic() - begin > deadline:
                before, written = written, self._written()
                if written == before:
                    raise RunError(
                        f"In phase 'checkpoint', the ranks of the actor wrote nothing for {deadline:g} s: look at the "
                        "disk, or set a larger launcher.call_timeout."
                    )
                begin = time.monotonic()
            time.sleep(_POLL_SECONDS)

    def _written(self) -> int:
        """Bytes that the save under way has written."""
        assert self._save is not None
        size = 0
        with suppress(FileNotFoundError):  # renamed in this moment, which is its commit
            for file in self._directory.partial(self._save.step).rglob("*"):
                size += file.stat().st_size
        return size

    def forget(self) -> None:
        """Drop the save under way, because its ranks have ended; what they wrote is removed by the next load."""
        if self._save is not None and self._save.commit is not None:
            self._save.commit.exception()  # it involves no rank, so it ends
        self._save = None

    @contextmanager
    def _undone_if_it_fails(self, step: int) -> Iterator[None]:
        try:
            yield
        except (CheckpointError, OSError) as error:
            self._save = None
            self._directory.abandon(step)
            raise CheckpointError(
                f"{self._directory.path(step)} was not saved, those before it are untouched: {error}."
            ) from error

    def _commit(self, save: _Save, files: dict[str, FileSum]) -> None:
        """Write the driver's part and the manifest, rename the directory, and remove older checkpoints."""
        partial = self._directory.partial(save.step)
        manifest = Manifest(save.step, save.identity, dict(files))
        write_durably(partial / STATE_FILE, save.state)
        manifest.files[STATE_FILE] = sum_file(partial / STATE_FILE)
        _require_visible(partial, manifest)
        _require_accounted(partial, files)
        manifest.write(partial)
        for directory in {(partial / name).parent for name in files} | {partial}:
            sync(directory)
        self._directory.commit(save.step)
        try:
            self._directory.drop_unfinished()
            self._directory.keep_newest(self._keep)
        except OSError as error:
            _logger.warning(
                f"{self._directory.path(save.step)} was saved, but one before it could not be removed: {error}."
            )


def _require_visible(partial: Path, manifest: Manifest) -> None:
    """Refuse a checkpoint whose parts lie on the local disks of several nodes: it could not be loaded."""
    try:
        manifest.check_sizes(partial)
    except BadCheckpoint as error:
        raise CheckpointError(
            f"what the actor's ranks wrote cannot be seen by the driver ({error}): output_dir must be on a file system "
            "that all nodes share"
        ) from None


def _require_accounted(partial: Path, files: Mapping[str, FileSum]) -> None:
    """Refuse a file that no rank has reported: its rank may not know that it is whole."""
    found = {f"{path.parent.name}/{path.name}" for path in partial.glob("*/*")}
    unknown = sorted(found - files.keys())
    if unknown:
        raise CheckpointError(f"the actor's rank that wrote {unknown[0]} did not report it")


def _saved(models: Models) -> dict[str, FileSum] | None:
    """The files of all models, by path in the checkpoint; None while a rank is writing. Raises CheckpointError."""
    parts = {name: model.saved() for name, model in models.items()}
    files: dict[str, FileSum] = {}
    for name, part in parts.items():
        if part is None:
            return None
        files |= {f"{name}/{file}": total for file, total in part.items()}
    return files


def _require_room(run_dir: Path, directory: CheckpointDirectory, identities: Mapping[str, dict[str, Any]]) -> None:
    """Raise CheckpointError if the disk has too little space for it."""
    needed, free = _expected_size(directory, identities), shutil.disk_usage(run_dir).free
    if needed > free:
        raise CheckpointError(
            f"it needs about {needed / _MIB:.1f} MiB and {free / _MIB:.1f} MiB are free there: make room, or set a "
            "smaller trainer.keep_checkpoints"
        )


def _expected_size(directory: CheckpointDirectory, identities: Mapping[str, dict[str, Any]]) -> int:
    """Bytes of the previous checkpoint, else an estimate from weights and optimizer."""
    try:
        return Manifest.read(directory.path(directory.steps()[-1])).size
    except (IndexError, BadCheckpoint):
        return sum(
            checkpoint_bytes(ModelShape(**{key: value for key, value in one.items() if key != "dtype"}), one["dtype"])
            for one in identities.values()
        )
