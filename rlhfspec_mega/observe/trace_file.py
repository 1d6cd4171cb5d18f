"""A file of trace events that grows at its end and can be read at any time, also after a crash."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

# Nothing follows the closing bracket: Perfetto may take even white space there for an error.
_OPENING, _SEPARATOR, _CLOSING = b"[\n", b",\n", b"\n]"


class TraceFile:
    """The array form of the Trace Event Format, which chrome://tracing and ui.perfetto.dev read: one event per line.

    Replacing the whole file whenever something is added would cost the square of a run's length, so the file is
    written in place: new events take the place of the closing bracket and end with another one. Between two calls the
    file is plain JSON. A crash in the middle of one leaves a file without its end. The format allows for that: the
    bracket is optional and a comma before it is dropped, so that only an unfinished last line must go. A resumed run
    does so when it opens the file again; Perfetto, which wants the bracket, reads it from then on.

    Attributes:
        events: in the file.
    """

    def __init__(self, path: Path) -> None:
        """The file appears with the first events; one that is there already is continued."""
        self._path = path
        self.events, self._end = _whole(path.read_bytes()) if path.is_file() else (0, 0)

    def append(self, events: Sequence[str]) -> None:
        """Add events, each of them a JSON object on one line. Raises OSError where that cannot be written."""
        if not events:
            return
        text = (_SEPARATOR if self.events else _OPENING) + _SEPARATOR.join(event.encode() for event in events)
        with self._path.open("r+b" if self.events else "wb") as file:
            file.seek(self._end)
            file.write(text + _CLOSING)
            file.truncate()
        self._end += len(text)
        self.events += len(events)


def _whole(data: bytes) -> tuple[int, int]:
    """Number of whole events in a file, and where the last of them ends."""
    lines = data.split(b"\n")
    while lines and not _is_event(lines[-1]):
        lines.pop()
    if not lines:
        return 0, 0
    return len(lines) - 1, len(b"\n".join(lines).rstrip(b",]"))  # the first line is the opening bracket


def _is_event(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line.rstrip(b",]")), dict)
    except ValueError:
        return False
