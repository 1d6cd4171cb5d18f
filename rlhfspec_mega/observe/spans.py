"""What a worker did and when, gathered where it happens in bounded memory until the driver asks for it;
and the driver's own seconds per phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlhfspec_mega.types import Span

LIMIT = 1024  # spans held; a driver asks several times a second, an engine that is driven otherwise may never be asked
GAP_SECONDS = 0.001  # idle time between two spans that still count as one
LEVEL = "batch"  # the one number that says how many at a time; all others are amounts, which add up


class SpanRecorder:
    """Takes span after span; those that continue the one before become part of it.

    A span continues another of the same name if nothing lies between them, and words and `batch` among their arguments
    are the same: a hundred decode steps of 8 samples are one span, whose other numbers are sums. When more than `limit`
    spans are held every two neighbours become one, so that a long time without `take` costs detail, not memory.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = max(limit, 2)
        self._spans: list[Span] = []

    def add(self, name: str, start: float, end: float, **arguments: float | int | str) -> None:
        """Record a span; start and end in seconds since the epoch, not before the end of the last one."""
        span = Span(name, start, end - start, arguments)
        if self._spans and _continues(self._spans[-1], span):
            self._spans[-1] = _joined(self._spans[-1], span)
            return
        if len(self._spans) == self._limit:
            pairs = [self._spans[place : place + 2] for place in range(0, self._limit, 2)]
            self._spans = [_joined(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
        self._spans.append(span)

    @contextmanager
    def measure(self, name: str, **arguments: float | int | str) -> Iterator[None]:
        """Record the time inside."""
        start = time.time()
        try:
            yield
        finally:
            self.add(name, start, time.time(), **arguments)

    def take(self) -> list[Span]:
        """The spans since the last call, in order of time."""
        taken, self._spans = self._spans, []
        return taken


def _continues(last: Span, span: Span) -> bool:
    if last.name != span.name or span.start - last.start - last.seconds > GAP_SECONDS:
        return False
    known, new = last.arguments, span.arguments
    return known.keys() == new.keys() and all(
        known[key] == value for key, value in new.items() if key == LEVEL or isinstance(value, str)
    )


def _joined(first: Span, second: Span) -> Span:
    """Both and what lies between them: amounts added up, the larger batch, and the words that are the same in both."""
    names = dict.fromkeys([*first.name.split(" + "), *second.name.split(" + ")])
    arguments = first.arguments | second.arguments
    for key in first.arguments.keys() & second.arguments.keys():
        one, other = first.arguments[key], second.arguments[key]
        if isinstance(one, str) or isinstance(other, str):
            if one != other:
                del arguments[key]
        else:
            arguments[key] = max(one, other) if key == LEVEL else one + other
    return Span(" + ".join(names), first.start, second.start + second.seconds - first.start, arguments)


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
