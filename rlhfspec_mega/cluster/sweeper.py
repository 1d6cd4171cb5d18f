"""Main module of a process that outlives its owner briefly, even if that was killed with SIGKILL, to clean up after it.

It ends the processes that use the owner's directory, such as Ray's agents, and removes the directory.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_SWEEP_SECONDS, _PAUSE_SECONDS = 10.0, 0.1


class Sweeper:
    """The owner's handle of the process that cleans up when this is closed or when the owner ends in any way."""

    def __init__(self, directory: Path) -> None:
        """`directory`: used by this owner alone; other processes that have a file open in it are killed."""
        command = [sys.executable, "-m", "rlhfspec_mega.cluster.sweeper", str(directory), str(os.getpid())]
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        self._process.wait()  # what goes on is a child of nobody here: SGLang kills all children of its process

    def close(self) -> None:
        """Clean up now and wait for it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.read()  # nothing comes but its end


def sweep(directory: Path, owner: int) -> None:
    """Kill every process except `owner` that has a file open in the directory, then remove the directory."""
    end = time.monotonic() + _SWEEP_SECONDS
    while time.monotonic() < end:
        users = processes_using(directory) - {owner}  # Ray's library in the driver keeps its log open
        for pid in users:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)
        if not users and not directory.exists():
            return
        time.sleep(_PAUSE_SECONDS)


def processes_using(directory: Path) -> set[int]:
    """Processes of this user with a file open in the directory, removed files included."""
    found = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if os.readlink(descriptor).startswith(f"{directory}{os.sep}"):
                found.add(int(descriptor.parts[2]))
    return found


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if os.fork():
        os._exit(0)
    sys.stdin.buffer.read()
    sweep(Path(sys.argv[1]), int(sys.argv[2]))


if __name__ == "__main__":
    main()
