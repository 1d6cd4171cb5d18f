"""Simulated inference tasks: the reference scores finished samples, on freed devices first and on all afterwards."""

from __future__ import annotations

import heapq
from collections import deque

from rlhfspec_mega.planning.rollout_state import Floats


class Scoring:
    """Schedules the scoring of samples. A device scores one sample at a time, without interruption.

    Args:
        engines: number of engines, each on one device.
        tokens: [samples] final number of tokens of prompt and response.
        token_seconds: seconds of a device per token.
        start: seconds before a device's first task.
        fused: whether devices without samples begin before the rollout is over.

    Attributes:
        waiting: whether a finished sample waits to be scored.
        tasks: number of tasks begun so far.
    """

    def __init__(self, engines: int, tokens: Floats, token_seconds: float, start: float, fused: bool) -> None:
        self.fused = fused
        self._seconds, self._token_seconds, self._start = (tokens * token_seconds).tolist(), token_seconds, start
        self._waiting: deque[int] = deque()
        self._waiting_seconds = self._expected_seconds = 0.0
        self._busy_until: list[float | None] = [None] * engines  # None: has not begun any
        self._spans: list[tuple[float, float]] = []

    def expect(self, tokens: float) -> None:
        """Set the predicted final number of tokens of all unfinished samples together."""
        self._expected_seconds = tokens * self._token_seconds

    def work_seconds(self) -> float:
        """Predicted device-seconds of all tasks that have not begun, for consolidation."""
        return self._waiting_seconds + self._expected_seconds

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def tasks(self) -> int:
        return len(self._spans)

    def add(self, sample: int) -> None:
        """Queue a sample that has ended."""
        self._waiting.append(sample)
        self._waiting_seconds += self._seconds[sample]

    def begin(self, engine: int, now: float) -> float | None:
        """Start scoring the sample that has waited longest; returns when it will be done, or None if none waits."""
        if not self._waiting:
            return None
        seconds = self._seconds[self._waiting.popleft()]
        self._waiting_seconds -= seconds
        until = now + seconds + (self._start if self._busy_until[engine] is None else 0.0)
        self._busy_until[engine] = until
        self._spans.append((now, until))
        return until

    def busy(self, engine: int, now: float) -> bool:
        """Whether a device is working on a task at this time."""
        until = self._busy_until[engine]
        return until is not None and until > now

    def seconds_before(self, now: float) -> float:
        """Device-seconds spent on tasks until `now`."""
        return sum(min(until, now) - begun for begun, until in self._spans)

    def finish_time(self, now: float) -> float:
        """Time at which all samples are scored if every device works on them from `now` on.

        Longest processing time first (LPT, Graham 1969): the longest task goes to the device that is free first.
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
