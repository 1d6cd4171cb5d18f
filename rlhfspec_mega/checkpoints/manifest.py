"""The manifest of a checkpoint: which step, whose model, and every file with its size and checksum."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhfspec_mega.checkpoints.directory import write_durably
from rlhfspec_mega.megatron.checkpoint_files import FileSum

MANIFEST_FILE = "manifest.json"
FORMAT = 1  # increase it when older code could not read the new files


class BadCheckpoint(Exception):
    """A checkpoint that must not be used; the message gives the reason without naming the checkpoint."""


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint.

    Attributes:
        step: finished steps.
        belongs_to: precision and model shape (MegatronModel.identity).
        files: by path inside the checkpoint.
    """

    step: int
    belongs_to: dict[str, Any]
    files: dict[str, FileSum]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())

    def write(self, directory: Path) -> None:
        """Write `manifest.json`, forced to disk. Raises OSError."""
        content = {"format": FORMAT, "step": self.step, "belongs_to": self.belongs_to, "files": self.files}
        write_durably(directory / MANIFEST_FILE, json.dumps(content | {"crc32": _checksum(content)}, indent=1))

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read it. Raises BadCheckpoint if it is missing, damaged or of an unknown format."""
        try:
            content = json.loads((directory / MANIFEST_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise BadCheckpoint(f"it has no {MANIFEST_FILE}, so it is not one of ours") from None
        except (OSError, ValueError):
            raise BadCheckpoint(f"its {MANIFEST_FILE} cannot be read") from None
        if not isinstance(content, dict) or "format" not in content:
            raise BadCheckpoint(f"its {MANIFEST_FILE} is not one of ours")
        if content["format"] != FORMAT:
            raise BadCheckpoint(f"it has format {content['format']}, and this version reads format {FORMAT} only")
        if content.pop("crc32", None) != _checksum(content):
            raise BadCheckpoint(f"the checksum of {MANIFEST_FILE} is wrong")
        files = {name: FileSum(*values) for name, values in content["files"].items()}
        return cls(content["step"], content["belongs_to"], files)

    def check_owner(self, identity: dict[str, Any]) -> None:
        """Raises BadCheckpoint if the checkpoint belongs to another model or precision than `identity`."""
        for key in identity.keys() | self.belongs_to.keys():
            there, here = self.belongs_to.get(key), identity.get(key)
            if there != here:
                raise BadCheckpoint(f"it belongs to another model: its {key} is {there}, and this run's is {here}")

    def check_sizes(self, directory: Path) -> None:
        """Raises BadCheckpoint if a file is missing or has another length."""
        for name, (size, _) in self.files.items():
            try:
                found = (directory / name).stat().st_size
            except OSError as error:
                raise BadCheckpoint(f"{name} cannot be read ({error.strerror})") from None
            if found != size:
                raise BadCheckpoint(f"{name} has {found} bytes instead of {size}")


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
