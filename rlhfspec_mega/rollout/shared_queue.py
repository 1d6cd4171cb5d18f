"""The samples that no engine has room for yet: an engine that has room takes the next one.

Members of a group stay together where they can: the engine has read their prompt already, and what one of them said
serves as drafts for the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class SharedQueue(Generic[Item]):
    """Samples by group, in the order in which groups were added."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[Item]] = {}
        self._length = 0
        self._fresh: dict[Hashable, None] = {}  # groups of which no engine has taken any
        self._begun: dict[int, dict[Hashable, None]] = {}  # groups with waiting samples that an engine has begun

    def __len__(self) -> int:
        return self._length

    def extend(self, group: Hashable, samples: Iterable[Item]) -> None:
        """Add samples of a group."""
        if group not in self._waiting:
            self._waiting[group] = deque()
            self._fresh[group] = None
        before = len(self._waiting[group])
        self._waiting[group].extend(samples)
        self._length += len(self._waiting[group]) - before

    def take(self, engine: int) -> Item:
        """The next sample for an engine: of a group that it has begun, else of a fresh one, else of the group of which
        most wait. Raises IndexError if none waits."""
        if not self._waiting:
            raise IndexError("no sample waits")
        begun = self._begun.setdefault(engine, {})
        for group in list(begun):
            if group in self._waiting:
                return self._pop(group)
            del begun[group]
        if self._fresh:
            group = next(iter(self._fresh))
            begun[group] = None
        else:
            group = max(self._waiting, key=lambda one: len(self._waiting[one]))
        return self._pop(group)

    def _pop(self, group: Hashable) -> Item:
        self._fresh.pop(group, None)
        found = self._waiting[group].popleft()
        self._length -= 1
        if not self._waiting[group]:
            del self._waiting[group]
        return found
