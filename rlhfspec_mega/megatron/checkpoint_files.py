"""Sizes and checksums of a checkpoint's files, and a rank's answer to a save; plain data that the driver reads, too."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

_PIECE = 2**22  # bytes read at once


class FileSum(NamedTuple):
    """A file's size in bytes and its CRC-32 (zlib's)."""

    size: int
    crc32: int


class SavedPart(NamedTuple):
    """One rank's part of a save: its files by name, or why the save failed (the same on all ranks)."""

    files: dict[str, FileSum]
    failure: str | None


def sum_file(path: Path) -> FileSum:
    """Read a whole file. Raises OSError."""
    size, crc32 = 0, 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            size, crc32 = size + len(piece), zlib.crc32(piece, crc32)
    return FileSum(size, crc32)


def sync(path: Path) -> None:
    """Force a file's bytes or a directory's entries to disk, before anything else is written."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_and_sum(directory: Path, names: Iterable[str]) -> dict[str, FileSum]:
    """Force these files of a directory to disk and compute their checksums. Raises OSError."""
    sums = {}
    for name in names:
        sync(directory / name)
        sums[name] = sum_file(directory / name)
    return sums


def first_damage(directory: Path, expected: Mapping[str, FileSum]) -> str | None:
    """A sentence about the first file that differs from what is expected; None if there is none."""
    for name, wanted in expected.items():
        try:
            found = sum_file(directory / name)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if found != wanted:
            return f"the checksum of {name} is wrong"
    return None
