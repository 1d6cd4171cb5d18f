"""Directories that are made on first use and kept: of several processes that want one, one makes it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from rlhfspec_mega.config.schema.run import RunConfig


def cache_root(config: RunConfig) -> Path:
    """Where directories made here are kept."""
    if config.model.cache_dir:
        return Path(config.model.cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rlhfspec_mega"


def cached(
    config: RunConfig, name: str, recipe: object, make: Callable[[Path], None], note: Callable[[str], None], what: str
) -> Path:
    """The model directory `name`-KEY from the cache, or made now; KEY tells recipes apart by their repr.

    Args:
        note: is told that `what`, the subject of a sentence, is made, or waited for.
    """
    key = hashlib.sha256(repr(recipe).encode()).hexdigest()[:10]
    directory = cache_root(config) / f"{name}-{key}"
    if not (directory / "config.json").exists():
        note(f"{what} is made here on first use and kept in {directory}.")
        made_once(directory, make, note)
    return directory


def made_once(path: Path, make: Callable[[Path], None], note: Callable[[str], None] = lambda sentence: None) -> None:
    """Have `make` write a directory that then takes the name `path`, unless it is there already.

    The lock ends with the process that holds it. Where the file system has none, several may make the directory, and
    the first one counts: nothing is replaced, as it may be in use.

    Args:
        note: is told where another process makes it already.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        with contextlib.suppress(OSError):
            _lock(lock.fileno(), path, note)
        if path.is_dir():
            return
        made = path.with_name(f"{path.name}.{os.getpid()}")
        make(made)
        try:
            made.rename(path)
        except OSError:
            if not path.is_dir():
                raise
            shutil.rmtree(made)


def _lock(descriptor: int, path: Path, note: Callable[[str], None]) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        note(f"Another process is making {path}: this one waits for it.")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
