"""What a worker spent its time on, in bounded memory until the driver asks; and the driver's seconds per phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlhfspec_mega.types import Span

LIMIT = 1024  # spans held; a driver asks several times a second, an engine that is driven otherwise may never be asked
GAP_SECONDS = 0.001  # longest idle time between two spans that are merged
LEVEL = "batch"  # the only argument that is not a sum


class SpanRecorder:
    """Records spans; a span that continues the previous one is merged with it.

    A span continues the previous one if nothing lies between them and the name, the words and `batch` among the
    arguments are equal: a hundred decode steps of 8 samples are one span, whose other numbers are sums. With more than
    `limit` spans, neighbours are merged in pairs, so that a long time without `take` costs detail, not memory.
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
        """Record the time spent inside this context."""
        start = time.time()
        try:
            yield
        finally:
            self.add(name, start, time.time(), **arguments)

    def take(self) -> list[Span]:
        """Spans since the last call, in order of time."""
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
    """One span for both and the time between them: sums of amounts, the larger batch, and the words that are equal."""
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
    """Charges every second to the innermost open phase, so that the phases of a step do not overlap.

    Args:
        entered: called with the name of each phase as it begins (for a live display).
        charged: called with name, start and end of every interval charged to a phase, in seconds since the epoch (for a
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
        """Charge the time spent inside this context to phase `name`."""
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
        """Seconds per phase since the last call."""
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
