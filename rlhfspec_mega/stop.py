"""When a run stops early: at a signal (the same one again ends it at once), or ahead of the end of its job."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

import psutil

# SIGUSR1 is what `sbatch --signal=USR1@300` sends ahead of the time limit.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
JOB_END = "SLURM_JOB_END_TIME"  # seconds since 1970, in every Slurm job
RESUME_STATUS = 75  # EX_TEMPFAIL: the same command with trainer.resume=true goes on


class StopSignals:
    """Watches for signals while used as a context manager.

    Args:
        note: prints a sentence for the user.

    Attributes:
        received: name of the signal that asked the run to stop, None while it may go on.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self._seen: set[int] = set()
        self.received: str | None = None

    def __enter__(self) -> StopSignals:
        for number in SIGNALS:
            if (
                self._before[number] is not signal.SIG_IGN
            ):  # a shell's background job ignores Ctrl-C, and must go on doing so
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Record the signal; the same signal again ends the run at once.

        A batch system may send SIGTERM after SIGUSR1, so another signal does not.
        """
        name = signal.Signals(number).name
        if number in self._seen and number != signal.SIGUSR1:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            sys.exit(128 + number)
        self._seen.add(number)
        if self.received is None:
            self.received = name
            at_once = "" if number == signal.SIGUSR1 else f" A second {name} stops it at once."
            self._note(f"{name}: the run finishes this step, saves and stops.{at_once}")


class JobEnd:
    """Tells when a run must save and stop, because its job ends before the next step would.

    Args:
        seconds: how long before the end the checkpoint must begin; 0: never stop.
        time_limit: seconds from `began` to the end, where Slurm does not give it.
        began: seconds since 1970; None: when this process was started.
    """

    def __init__(self, seconds: float, time_limit: float, began: float | None = None) -> None:
        self._last = time.time()
        self._longest = 0.0
        time_limit += psutil.Process().create_time() if began is None else began
        end = float(os.environ[JOB_END]) if JOB_END in os.environ else time_limit
        self._latest = end - seconds if seconds > 0 else float("inf")

    def steps_begin(self) -> None:
        """Call before the first step, and before the first one after a recovery, whose time is none of a step."""
        self._last = time.time()

    def reached(self) -> bool:
        """Call after each step: whether the next one, if it is as long as the longest, would end too late."""
        now = time.time()
        self._longest, self._last = max(self._longest, now - self._last), now
        return now + self._longest > self._latest
