"""Where a run's time goes: seconds per phase of a step and in total, and the name of the phase that failed."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Every second is charged to the innermost open phase, so phases of a step sum to the time spent in phases.

    Attributes:
        totals: seconds per phase since the start of the run.
    """

    def __init__(self, entered: Callable[[str], None] | None = None, clock: Callable[[], float] = time.perf_counter):
        """`entered` is told the name of each phase as it begins (for a live display)."""
        self.totals: dict[str, float] = defaultdict(float)
        self._step: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._failed: str | None = None
        self._entered = entered
        self._clock = clock
        self._mark = 0.0

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Charge the time inside to phase `name`."""
        self._charge()
        self._open.append(name)
        self._failed = None
        if self._entered:
            self._entered(name)
        try:
            yield
        except BaseException:
            # The innermost phase is left first and is the one to name.
            self._failed = self._failed or name
            raise
        finally:
            self._charge()
            self._open.pop()

    @property
    def current(self) -> str | None:
        """The phase that is open, or after an exception the one in which it was raised; None between phases."""
        return self._failed or (self._open[-1] if self._open else None)

    def take_step(self) -> dict[str, float]:
        """Seconds per phase since the last call, and begin to count anew."""
        self._charge()
        taken, self._step = dict(self._step), defaultdict(float)
        return taken

    def _charge(self) -> None:
        now = self._clock()
        if self._open:
            self.totals[self._open[-1]] += now - self._mark
            self._step[self._open[-1]] += now - self._mark
        self._mark = now
