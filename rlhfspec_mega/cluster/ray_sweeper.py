"""Main module of a process that outlives the driver by a moment: ends what is left of an own Ray instance, even if the
driver was killed with -9. Ray's daemons then die with the driver, but its agents wait for them for over a minute."""

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
    """The driver's end. The process waits until this is closed or the driver ends, whichever way."""

    def __init__(self, directory: Path) -> None:
        """`directory`: of the instance; every process of Ray has log files open in it."""
        command = [sys.executable, "-m", "rlhfspec_mega.cluster.ray_sweeper", str(directory)]
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, start_new_session=True, env=os.environ | {"PYTHONPATH": path}
        )

    def close(self) -> None:
        """Sweep now and wait for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def sweep(directory: Path, driver: int) -> None:
    """Kill every process, other than the driver, that has a file open in the directory, and remove it."""
    end = time.monotonic() + _SWEEP_SECONDS
    while time.monotonic() < end:
        users = processes_using(directory) - {driver}  # Ray's library in the driver keeps its log open
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
    driver = os.getppid()
    sys.stdin.buffer.read()
    sweep(Path(sys.argv[1]), driver)


if __name__ == "__main__":
    main()
