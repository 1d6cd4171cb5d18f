"""Directories that are built on first use and kept; if several processes need one, one of them builds it."""

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
    """The directory of the cache."""
    if config.model.cache_dir:
        return Path(config.model.cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rlhfspec_mega"


def cached(
    config: RunConfig, name: str, recipe: object, make: Callable[[Path], None], note: Callable[[str], None], what: str
) -> Path:
    """The cached model directory `name`-KEY, built if it is missing; KEY is a hash of the recipe's repr.

    Args:
        note: is told when `what`, the subject of a sentence, is built or waited for.
    """
    key = hashlib.sha256(repr(recipe).encode()).hexdigest()[:10]
    directory = cache_root(config) / f"{name}-{key}"
    if not (directory / "config.json").exists():
        note(f"{what} is made here on first use and kept in {directory}.")
        made_once(directory, make, note)
    return directory


def made_once(path: Path, make: Callable[[Path], None], note: Callable[[str], None] = lambda sentence: None) -> None:
    """Run `make` to write a directory, which is then renamed to `path`, unless `path` exists.

    A lock ends with the process that holds it. On a file system without locks several processes may build the
    directory: the first one counts, and nothing is replaced, since it may be in use.

    Args:
        note: is told if another process is already building it.
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
