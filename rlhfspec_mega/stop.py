"""Signals: the first one asks the run to finish its step, save and exit; the same signal again ends it at once."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType

# SIGUSR1 is what `sbatch --signal=USR1@300` sends ahead of the time limit.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
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
