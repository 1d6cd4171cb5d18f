"""Files with one JSON object per line: reading them, and cutting off steps that a resumed run repeats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlhfspec_mega.errors import UserError


def text_lines(path: Path) -> list[str]:
    """The file's lines with their ends. Only newlines end a line: responses may hold other separators unescaped."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return list(file)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every object of the file. Raises UserError naming file and line for a missing file or a bad line."""
    if not path.is_file():
        raise UserError(f"There is no file {path}: correct the path.")
    objects = []
    for number, line in enumerate(text_lines(path), start=1):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise UserError(f"{path}, line {number} is not a JSON object: remove the line.")
        objects.append(value)
    return objects


def keep_steps_before(path: Path, step: int) -> None:
    """Drop the lines of `step` and later, and an incomplete last line that a killed run left.

    The file is replaced atomically, so an interruption loses nothing. A missing file stays missing.
    """
    if not path.is_file():
        return
    lines = text_lines(path)
    kept = [line for line in lines if line.endswith("\n") and _step_of(line) < step]
    if kept != lines:
        partial = path.with_name(path.name + ".partial")
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(kept)
        partial.replace(path)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
