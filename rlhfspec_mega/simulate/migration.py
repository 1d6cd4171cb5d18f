"""Simulated migrations: one stage-one copy at a time out of an engine, then the downtime of stage two."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(eq=False)
class Migration:
    """A sample under way. It is decoded at the source until its copy is done; `void` once it has ended before that."""

    sample: int
    source: int
    destination: int
    void: bool = False


class Migrations:
    """Who is under way, and which copy each engine makes now.

    Attributes:
        under_way: by sample.
        incoming: migrations to each engine.
        done, overtaken: migrations that arrived, and those whose sample ended first.
    """

    def __init__(self, engines: int) -> None:
        self.under_way: dict[int, Migration] = {}
        self.incoming = [0] * engines
        self.done = self.overtaken = 0
        self._copying: list[Migration | None] = [None] * engines
        self._outboxes: list[deque[Migration]] = [deque() for _ in range(engines)]

    def add(self, sample: int, source: int, destination: int) -> None:
        """Queue a migration at its source."""
        migration = Migration(sample, source, destination)
        self.under_way[sample] = migration
        self.incoming[destination] += 1
        self._outboxes[source].append(migration)

    def next_copy(self, source: int) -> Migration | None:
        """The copy that an engine begins now; None if it makes one already, or has none to make."""
        if self._copying[source] or not self._outboxes[source]:
            return None
        self._copying[source] = migration = self._outboxes[source].popleft()
        return migration

    def copied(self, migration: Migration) -> None:
        """Stage one is over: the source may begin its next copy."""
        self._copying[migration.source] = None

    def arrive(self, migration: Migration) -> None:
        """The sample is at its destination."""
        self._leave(migration)
        self.done += 1

    def overtake(self, sample: int) -> tuple[Migration, bool]:
        """A sample under way ended at its source: its migration is void. Also whether its copy was being made."""
        migration = self.under_way[sample]
        self._leave(migration)
        migration.void = True
        self.overtaken += 1
        was_copied = self._copying[migration.source] is migration
        if was_copied:
            self._copying[migration.source] = None
        else:
            self._outboxes[migration.source].remove(migration)
        return migration, was_copied

    def _leave(self, migration: Migration) -> None:
        del self.under_way[migration.sample]
        self.incoming[migration.destination] -= 1
