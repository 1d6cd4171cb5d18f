"""The directory of a run's checkpoints.

Every change is one rename, so that it stays consistent if the process is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from rlhfspec_mega.megatron.checkpoint_files import sync

_LATEST, _PREFIX = "latest", "step_"
_PARTIAL, _REPLACED, _BAD = ".partial", ".replaced", ".bad"


class CheckpointDirectory:
    """Checkpoints by number of finished steps. A directory gets the name step_<number> only when it is complete."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        return self.root / f"{_PREFIX}{step}"

    def steps(self) -> list[int]:
        """Steps of complete checkpoints, oldest first, damaged ones included."""
        names = [path.name.removeprefix(_PREFIX) for path in self.root.glob(f"{_PREFIX}*")]
        return sorted(int(name) for name in names if name.isdecimal())

    def latest(self) -> int | None:
        """The step that the file `latest` names, whether that checkpoint exists or not; None without a valid file."""
        try:
            name = (self.root / _LATEST).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None
        number = name.removeprefix(_PREFIX)
        return int(number) if name.startswith(_PREFIX) and number.isdecimal() else None

    def set_aside(self) -> list[Path]:
        """Checkpoints that earlier loads found to be bad."""
        return sorted(self.root.glob(f"{_PREFIX}*{_BAD}"))

    def begin(self, step: int) -> Path:
        """Create an empty directory to write a checkpoint into."""
        if not self.root.exists():
            self.root.mkdir()
            sync(self.root.parent)
        self.partial(step).mkdir()
        return self.partial(step)

    def partial(self, step: int) -> Path:
        """The directory that `begin` created."""
        return self._beside(step, _PARTIAL)

    def abandon(self, step: int) -> None:
        """Remove what a failed save wrote."""
        shutil.rmtree(self._beside(step, _PARTIAL), ignore_errors=True)
        with contextlib.suppress(OSError):  # another error is already being reported
            self._next_latest.unlink()

    def commit(self, step: int) -> None:
        """Make the checkpoint that was begun the latest one. Its files must be on disk.

        An older checkpoint of the same step is kept as step_<number>.replaced until drop_unfinished.
        """
        final, replaced = self.path(step), self._beside(step, _REPLACED)
        self._write_next_latest(step)
        if final.exists():
            os.rename(final, replaced)
        os.rename(self._beside(step, _PARTIAL), final)
        sync(self.root)
        os.replace(self._next_latest, self.root / _LATEST)
        sync(self.root)

    def point_to(self, step: int) -> None:
        """Make an existing checkpoint the latest one."""
        self._write_next_latest(step)
        os.replace(self._next_latest, self.root / _LATEST)
        sync(self.root)

    def mark_bad(self, step: int) -> None:
        """Rename a checkpoint so that it is neither loaded nor counted."""
        bad = self._beside(step, _BAD)
        self._remove(bad)
        os.rename(self.path(step), bad)

    def keep_newest(self, count: int) -> None:
        """Remove all but the newest complete checkpoints."""
        for step in self.steps()[:-count]:
            self._remove(self.path(step))

    def drop_unfinished(self) -> None:
        """Remove what killed processes left half written or half removed.

        Restore a checkpoint that was about to be replaced.
        """
        for left in self.root.glob(f"{_PREFIX}*{_REPLACED}"):
            final = left.with_suffix("")
            if final.exists():
                self._remove(left)
            else:
                os.rename(left, final)
        for left in self.root.glob(f"{_PREFIX}*{_PARTIAL}"):
            shutil.rmtree(left, ignore_errors=True)
        self._next_latest.unlink(missing_ok=True)

    def drop_newer_than_latest(self) -> None:
        """Remove complete checkpoints newer than `latest`.

        Their save never returned, so the run continued from an earlier checkpoint; they belong to an abandoned history.
        """
        latest = self.latest()
        for step in self.steps():
            if latest is not None and step > latest:
                self._remove(self.path(step))

    @property
    def _next_latest(self) -> Path:
        return self.root / f"{_LATEST}{_PARTIAL}"

    def _write_next_latest(self, step: int) -> None:
        write_durably(self._next_latest, f"{_PREFIX}{step}\n")

    def _beside(self, step: int, suffix: str) -> Path:
        return self.path(step).with_suffix(suffix)

    def _remove(self, path: Path) -> None:
        """Remove a directory, if it exists, so that a partly removed one is never taken for a checkpoint."""
        if not path.exists():
            return
        doomed = path.with_name(f"{path.name}{_PARTIAL}")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def write_durably(path: Path, text: str) -> None:
    """Write a file and force it to disk. Raises OSError."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
