"""Limits restarts of workers between two finished steps, for each worker separately."""

from __future__ import annotations

from collections import Counter


class Restarts:
    """Counts restarts by worker, so that one that dies at the same point every time is not restarted forever."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._taken: Counter[str] = Counter()

    def take(self, name: str) -> bool:
        """Count one restart; returns False if the limit is reached."""
        if self._taken[name] >= self.most:
            return False
        self._taken[name] += 1
        return True

    def refill(self) -> None:
        """A step has finished: all counts begin anew."""
        self._taken.clear()
