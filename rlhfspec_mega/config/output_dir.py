"""The directory of a run: reserved once per name, or reopened by a resumed run; for one process at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import yaml

from rlhfspec_mega.config.describe import plain
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.errors import UserError

CONFIG_FILE, OVERRIDES_FILE = "config.yaml", "overrides.yaml"
LOCK_FILE = "run.lock"  # locked while a process uses the directory; the file stays when it ends
CHECKPOINTS = "checkpoints"  # holds one directory per checkpoint
# What a resumed run must share with its beginning; parallel sizes and engines may change.
SAME_ON_RESUME = ("task", "seed", "model", "data")
_NO_LOCKS = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK)  # errors of a file system without flock

_logger = logging.getLogger(__name__)


def output_dir(config: RunConfig) -> Path:
    """The directory of the run with this name."""
    return Path(config.output_dir) / config.name


def check_output_dir(config: RunConfig) -> None:
    """Refuse a directory that this run may not use; creates nothing.

    A run may resume without a checkpoint: one that died before its first checkpoint starts again.

    Raises:
        UserError: the directory exists and the run does not resume, or it resumes and there is no such run, or the
            saved seed, model or data differ.
    """
    directory = output_dir(config)
    if not config.trainer.resume:
        if directory.exists():
            raise _taken(directory)
        return
    if not directory.is_dir():
        raise UserError(f"There is no run {directory} to resume: leave out trainer.resume=true, or correct the name.")
    _check_same(directory, config)


@contextmanager
def claimed_output_dir(config: RunConfig, overrides: Sequence[str] = ()) -> Iterator[Path]:
    """Reserve the run's directory for this process and write the resolved configuration and the overrides into it.

    If several processes try to reserve one name, exactly one succeeds, whether they begin the run or resume it. A
    resumed run keeps its directory, and the two files are replaced. A run that is refused before a worker starts, and
    so leaves nothing but them, gives its name free again.

    Raises:
        UserError: as check_output_dir, or another process uses the directory, or it cannot be written.
    """
    check_output_dir(config)
    directory = output_dir(config)
    with _writing(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(exist_ok=config.trainer.resume)
        lock = _lock(directory)
    with lock:
        try:
            with _writing(directory):
                _replace(directory / OVERRIDES_FILE, yaml.safe_dump(list(overrides)))
                _replace(directory / CONFIG_FILE, yaml.safe_dump(plain(config), sort_keys=False))
            yield directory
        finally:
            _remove_unused(directory)


def holder(directory: Path) -> str | None:
    """Who uses the directory of a run, e.g. "process 17 on node3"; None if nobody does."""
    try:
        with (directory / LOCK_FILE).open("r", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return lock.read() or "another process"
    except OSError:  # no lock file, or no locks
        return None
    return None


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise _taken(directory) from None
    except OSError as error:
        raise UserError(f"{directory} cannot be written ({error.strerror}): set another output_dir=.") from None


def _lock(directory: Path) -> TextIO:
    """The open lock file of the run, locked until it is closed; the kernel closes it however the process ends.

    Programs that this process starts do not inherit it: Python opens files close-on-exec.

    Raises:
        UserError: another process holds it.
        OSError: it cannot be opened.
    """
    lock = (directory / LOCK_FILE).open("a+", encoding="utf-8")
    try:
        _take(lock)
    except BlockingIOError:
        with lock:
            raise _in_use(lock, directory) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _logger.warning(
            f"The file system of {directory} has no locks ({error.strerror}): take care that only one process at a "
            "time runs there."
        )
    if os.fstat(lock.fileno()).st_nlink == 0:  # its holder has just removed it with the directory
        with lock:
            raise _in_use(lock, directory)
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
    lock.flush()
    return lock


def _take(lock: TextIO) -> None:
    """Lock the file; tries again for half a second, because `holder` has it for an instant."""
    for _ in range(5):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.1)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _in_use(lock: TextIO, directory: Path) -> UserError:
    lock.seek(0)
    return UserError(
        f"{directory} is in use by {lock.read() or 'another process'}: wait for its end or stop it before you resume "
        f"that run, or start another with name={directory.name}2."
    )


def _remove_unused(directory: Path) -> None:
    """Give the name free again if the run left nothing but its configuration, so that no worker was started.

    The lock is removed last: whoever creates another one meanwhile has the directory.
    """
    if {entry.name for entry in directory.iterdir()} <= {CONFIG_FILE, OVERRIDES_FILE, LOCK_FILE}:
        for name in (CONFIG_FILE, OVERRIDES_FILE, LOCK_FILE):
            (directory / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            directory.rmdir()


def _replace(file: Path, text: str) -> None:
    """Write a file atomically: a resumed run that is killed must find its configuration the next time."""
    partial = file.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)


def _taken(directory: Path) -> UserError:
    other = f"start another run with name={directory.name}2"
    if (directory / CONFIG_FILE).exists():
        return UserError(f"{directory} exists already: go on with that run by trainer.resume=true, or {other}.")
    return UserError(f"{directory} exists already and holds no run: {other}, or remove it.")


def _check_same(directory: Path, config: RunConfig) -> None:
    file = directory / CONFIG_FILE
    try:
        saved = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        saved = None
    if not isinstance(saved, dict):
        raise UserError(f"{file} cannot be read, so the run cannot be resumed: start another with another name=.")
    for key, (before, now) in _differences(saved, plain(config)).items():
        raise UserError(
            f"{directory} was started with {key}={before}, not {now}: resume with {key}={before}, or start another run "
            "with another name=."
        )


def _differences(saved: dict[str, Any], current: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Option -> (saved, current) for the options that a resumed run may not change."""
    found = {}
    for section in SAME_ON_RESUME:
        old, new = saved.get(section), current[section]
        if isinstance(new, dict):
            old = old if isinstance(old, dict) else {}
            # The model's cache may move; its contents are the same.
            keys = [key for key in new if f"{section}.{key}" != "model.cache_dir"]
            found.update({f"{section}.{key}": (old.get(key), new[key]) for key in keys if old.get(key) != new[key]})
        elif old != new:
            found[section] = (old, new)
    return found
