"""Learnt models of cost, acceptance and lengths, saved with a run's results so that a resumed run starts from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LEARNT_FILE = "learnt.json"


class Learnt:
    """The file in a run's directory that holds learnt models by name.

    Args:
        resumed: start from the contents of the existing file.
    """

    def __init__(self, run_dir: Path, resumed: bool) -> None:
        self._file, self._resumed = run_dir / LEARNT_FILE, resumed

    def load(self, what: str) -> Any:
        """The saved state under this name; None if there is none or the file cannot be read."""
        if not self._resumed:
            return None
        try:
            return json.loads(self._file.read_text(encoding="utf-8"))[what]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, learnt: dict[str, Any]) -> None:
        """Write the states of all learnt models, by name. Raises OSError."""
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(learnt) + "\n", encoding="utf-8")
        partial.replace(self._file)
