"""Where a run's time goes: seconds per phase of a step and in total."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Every second is charged to the innermost open phase, so phases of a step sum to the time spent in phases.

    Args:
        entered: is told the name of each phase as it begins (for a live display).
        charged: is told name, start and end of all that is charged to a phase, in seconds since the epoch (for a
            timeline).

    Attributes:
        totals: seconds per phase since the start of the run.
    """

    def __init__(
        self,
        entered: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        charged: Callable[[str, float, float], None] | None = None,
    ):
        self.totals: dict[str, float] = defaultdict(float)
        self._step: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._entered = entered
        self._charged = charged
        self._clock = clock
        self._mark = 0.0

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Charge the time inside to phase `name`."""
        self._charge()
        self._open.append(name)
        if self._entered:
            self._entered(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def take_step(self) -> dict[str, float]:
        """Seconds per phase since the last call, and begin to count anew."""
        self._charge()
        taken, self._step = dict(self._step), defaultdict(float)
        return taken

    def _charge(self) -> None:
        now = self._clock()
        if self._open:
            name, seconds = self._open[-1], now - self._mark
            self.totals[name] += seconds
            self._step[name] += seconds
            if self._charged:
                ended = time.time()
                self._charged(name, ended - seconds, ended)
        self._mark = now
