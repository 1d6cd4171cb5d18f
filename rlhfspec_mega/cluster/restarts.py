"""How often workers may be restarted: so many times between two finished steps, each worker for itself."""

from __future__ import annotations

from collections import Counter


class Restarts:
    """Counts restarts by name. A worker that dies at the same point every time must not be started forever."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._taken: Counter[str] = Counter()

    def take(self, name: str) -> bool:
        """Count one restart; False when there may be no more."""
        if self._taken[name] >= self.most:
            return False
        self._taken[name] += 1
        return True

    def refill(self) -> None:
        """There was progress: every count begins anew."""
        self._taken.clear()
