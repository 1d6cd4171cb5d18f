"""What the tools share: one sentence for bad input, and progress in bytes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from rlhfspec_mega.errors import RunError, UserError

_GIB = 2**30
_NOTHING_LEFT = "nothing half-written is left behind."


def exit_status(work: Callable[[], None]) -> int:
    """Run a tool; errors are one sentence on standard error: status 2 for bad input, 1 for what failed, 130 for ^C.

    The sentence about ^C and the system's errors promises that nothing half-written is left: `work` must write under
    another name, rename at the end, and remove what it wrote if that does not come.
    """
    try:
        work()
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except (RunError, OSError) as error:
        print(error if isinstance(error, RunError) else _of_system(error), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"Interrupted; {_NOTHING_LEFT}", file=sys.stderr)
        return 130
    return 0


@contextmanager
def progress_in_bytes(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error while bytes are written; the function yielded is called with each number of bytes."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda written: bar.advance(task, written)


def require_room(path: Path, needed: int) -> None:
    """Raises UserError if the disk of a directory that is to be made has too little space."""
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise UserError(
            f"{path} needs {needed / _GIB:.1f} GiB and {free / _GIB:.1f} GiB are free there: make room or name another "
            "place."
        )


def _of_system(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}; {_NOTHING_LEFT}"
