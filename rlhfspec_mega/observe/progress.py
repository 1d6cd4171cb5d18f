"""What a run is doing right now, in a file: python -m tools.status reads it while the run goes on."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import NamedTuple

PROGRESS_FILE = "progress.json"


class Progress(NamedTuple):
    """The phase that a run is in, and the time at which it began, in seconds since the epoch."""

    phase: str
    since: float


def write_progress(directory: Path, phase: str) -> None:
    """Record that this phase begins now. A disk that is full costs the record, not the run."""
    partial = directory / f"{PROGRESS_FILE}.partial"
    with contextlib.suppress(OSError):
        partial.write_text(json.dumps(Progress(phase, time.time())._asdict()), encoding="utf-8")
        partial.replace(directory / PROGRESS_FILE)


def read_progress(directory: Path) -> Progress | None:
    """The last record; None if there is none yet."""
    try:
        found = Progress(**json.loads((directory / PROGRESS_FILE).read_text(encoding="utf-8")))
        return Progress(str(found.phase), float(found.since))
    except (OSError, ValueError, TypeError):
        return None
