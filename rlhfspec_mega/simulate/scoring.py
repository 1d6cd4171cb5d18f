"""Simulated inference tasks: the reference scores finished samples, on freed devices first and on all afterwards."""

from __future__ import annotations

import heapq
from collections import deque

from rlhfspec_mega.planning.rollout_state import Floats


class Scoring:
    """Which samples are scored when, one at a time on a device and never interrupted.

    Args:
        tokens: [samples] of prompt and response, once they have ended.
        token_seconds: of a device, for each of them.
        start: seconds before a device's first task.
        fused: devices without samples begin before the rollout is over.

    Attributes:
        tasks: begun so far.
    """

    def __init__(self, engines: int, tokens: Floats, token_seconds: float, start: float, fused: bool) -> None:
        self.fused = fused
        self._seconds, self._token_seconds, self._start = (tokens * token_seconds).tolist(), token_seconds, start
        self._waiting: deque[int] = deque()
        self._waiting_seconds = self._expected_seconds = 0.0
        self._busy_until: list[float | None] = [None] * engines  # None: never began
        self._spans: list[tuple[float, float]] = []

    def expect(self, tokens: float) -> None:
        """Samples that have not ended are predicted to come to so many tokens."""
        self._expected_seconds = tokens * self._token_seconds

    def work_seconds(self) -> float:
        """Device-seconds of the tasks that nobody has begun, as far as it can be known; consolidation asks."""
        return self._waiting_seconds + self._expected_seconds

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def tasks(self) -> int:
        return len(self._spans)

    def add(self, sample: int) -> None:
        """A sample has ended and may be scored."""
        self._waiting.append(sample)
        self._waiting_seconds += self._seconds[sample]

    def begin(self, engine: int, now: float) -> float | None:
        """Give a device the sample that has waited longest; when it will be done, or None if none waits."""
        if not self._waiting:
            return None
        seconds = self._seconds[self._waiting.popleft()]
        self._waiting_seconds -= seconds
        until = now + seconds + (self._start if self._busy_until[engine] is None else 0.0)
        self._busy_until[engine] = until
        self._spans.append((now, until))
        return until

    def busy(self, engine: int, now: float) -> bool:
        """Whether a device is at a task at this moment."""
        until = self._busy_until[engine]
        return until is not None and until > now

    def seconds_before(self, now: float) -> float:
        """Device-seconds that tasks took until `now`."""
        return sum(min(until, now) - begun for begun, until in self._spans)

    def rest(self, now: float) -> float:
        """When all is scored if every device helps from `now` on: longest first, to the device that is free first.

        The rule is LPT (Graham 1969).
        """
        ready = (now + self._start if until is None else max(now, until) for until in self._busy_until)
        free = [(until, rank) for rank, until in enumerate(ready)]
        heapq.heapify(free)
        last = max((until for until in self._busy_until if until is not None), default=now)
        for seconds in sorted((self._seconds[sample] for sample in self._waiting), reverse=True):
            until, rank = heapq.heappop(free)
            last = max(last, until + seconds)
            heapq.heappush(free, (until + seconds, rank))
        return max(now, last)
