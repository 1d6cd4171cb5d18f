"""A simulated engine as a fluid: its live samples gain tokens at one common rate, which changes only at events.

Also migrations between engines: each engine makes one stage-one copy at a time, followed by the downtime of stage two.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from rlhfspec_mega.simulate.curves import DecodeCurve

SAME_TOKEN = 1e-6  # tokens; ends that differ by less are one event, since sums of floats have rounding errors


@dataclass(frozen=True)
class QueuedSample:
    """A sample that is handed to an engine.

    Attributes:
        left: tokens still to be decoded.
        total: tokens of prompt and response once the sample has finished.
        prefill: prompt tokens to be read first, unless this engine has read the group's prompt already; 0 for a
            migrated sample, which brings its KV.
    """

    sample: int
    group: int
    left: float
    total: float
    prefill: int


class FluidEngine:
    """Decodes up to `slots` samples at once. Others wait; migrated samples, which bring their KV, are admitted first.

    Between two events, each sample of a batch of B gains g tokens in a * g + c * (kv * g + B * g^2 / 2) seconds, since
    the KV cache grows from `kv` by B per token. a and c are the curve's seconds and kv_seconds at B. Reading a prompt
    stops decoding for as long as it takes.

    Attributes:
        live: by sample, the value of `level` at which it ends.
        waiting: samples without a slot, in the order of admission.
        level: tokens that a sample that was live from the beginning would have gained by `time`.
        decoded: tokens gained by all samples.
        kv, kv_peak: tokens in the KV cache, current and maximum.
        last_held: last time at which the engine held a sample.
        copies: stage-one copies that the engine takes part in, as source or destination.
        reading_until: time until which it reads prompts and does not decode.
    """

    def __init__(self, rank: int, slots: int, curve: DecodeCurve, prefill_seconds: float, copy_share: float) -> None:
        self.rank, self.slots = rank, slots
        self.live: dict[int, float] = {}
        self.waiting: dict[int, QueuedSample] = {}
        self.level = self.decoded = self.kv = self.kv_peak = self.time = self.last_held = 0.0
        self.copies = 0
        self._totals: dict[int, float] = {}
        self._ends: list[tuple[float, int]] = []  # heap; entries of moved samples are dropped when met
        self._token_seconds, self._kv_seconds = curve.tables(slots)
        self._prefill_seconds, self._read = prefill_seconds, set[int]()
        self._copy_load = copy_share / (1.0 - copy_share)  # seconds lost to a copy per second of decoding
        self.reading_until = 0.0

    @property
    def empty(self) -> bool:
        return not self.live and not self.waiting

    def advance(self, now: float) -> None:
        """Decode until `now`; no sample may end before."""
        seconds = now - max(self.time, min(self.reading_until, now))
        if not self.empty:
            self.last_held = now
        self.time = now
        if self.live and seconds > 0:
            self._gain(self._tokens_in(seconds))

    def next_end(self) -> float | None:
        """Time at which the next sample ends if nothing else happens; None without live samples."""
        while self._ends and self.live.get(self._ends[0][1]) != self._ends[0][0]:
            heapq.heappop(self._ends)
        if not self._ends:
            return None
        return max(self.time, self.reading_until) + self._seconds_for(self._ends[0][0] - self.level)

    def end(self, now: float) -> list[int]:
        """Remove and return the samples that end at `now`, a time that came from `next_end`."""
        self.advance(now)
        level = self._ends[0][0]
        self._gain(level - self.level)  # corrects rounding
        ended = []
        while self._ends and self._ends[0][0] <= level + SAME_TOKEN:
            end, sample = heapq.heappop(self._ends)
            if self.live.get(sample) == end:
                ended.append(sample)
                self._leave(sample)
        return ended

    def take(self, queued: QueuedSample) -> None:
        """Queue a sample, to which `admit` gives a slot."""
        if queued.prefill:
            self.waiting[queued.sample] = queued
        else:
            self.waiting = {queued.sample: queued} | self.waiting

    def admit(self) -> None:
        """Give free slots to waiting samples, at the current `time`."""
        while self.waiting and len(self.live) < self.slots:
            queued = self.waiting.pop(next(iter(self.waiting)))
            if queued.prefill and queued.group not in self._read:
                self._read.add(queued.group)
                self.reading_until = max(self.reading_until, self.time) + queued.prefill * self._prefill_seconds
            end = self.level + queued.left
            self.live[queued.sample], self._totals[queued.sample] = end, queued.total
            heapq.heappush(self._ends, (end, queued.sample))
            self.kv += queued.total - queued.left
        self.kv_peak = max(self.kv_peak, self.kv)

    def left(self, sample: int) -> float:
        """Tokens that a sample on this engine still has to decode at the current `time`."""
        return self.waiting[sample].left if sample in self.waiting else self.live[sample] - self.level

    def withdraw(self, sample: int) -> float:
        """Remove an unfinished sample, live or waiting, at the current `time`; returns its tokens left to decode."""
        left = self.left(sample)
        if sample in self.waiting:
            del self.waiting[sample]
        else:
            self._leave(sample)
        return left

    def _leave(self, sample: int) -> None:
        left = self.left(sample)
        del self.live[sample]
        self.kv -= self._totals.pop(sample) - left
        if not self.live:
            self.kv = 0.0
            self._ends.clear()

    def _gain(self, tokens: float) -> None:
        gained = len(self.live) * tokens
        self.level += tokens
        self.decoded += gained
        self.kv += gained
        self.kv_peak = max(self.kv_peak, self.kv)

    def _seconds_for(self, tokens: float) -> float:
        pace, growth = self._pace()
        return tokens * (pace + 0.5 * growth * tokens)

    def _tokens_in(self, seconds: float) -> float:
        """Inverse of `_seconds_for`: the root of a quadratic, in the form that also holds for growth 0."""
        pace, growth = self._pace()
        return 2.0 * seconds / (pace + math.sqrt(pace * pace + 2.0 * growth * seconds))

    def _pace(self) -> tuple[float, float]:
        """Seconds of the next token, and their growth per token."""
        batch = len(self.live)
        stretch, kv_seconds = 1.0 + self.copies * self._copy_load, self._kv_seconds[batch]
        return stretch * (self._token_seconds[batch] + kv_seconds * self.kv), stretch * kv_seconds * batch


@dataclass(eq=False)
class Migration:
    """A sample on the way. The source decodes it until its copy is done; if it ends before, it is `cancelled`."""

    sample: int
    source: int
    destination: int
    cancelled: bool = False


class Migrations:
    """The migrations in progress, and the copy that each engine is making.

    Attributes:
        under_way: migrations by sample.
        incoming: number of migrations to each engine.
        done, overtaken: numbers of migrations that arrived, and of those whose sample ended before its copy was done.
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
        """Start the next copy of this engine; None if it is making one already or has none to make."""
        if self._copying[source] or not self._outboxes[source]:
            return None
        self._copying[source] = migration = self._outboxes[source].popleft()
        return migration

    def copied(self, migration: Migration) -> None:
        """Stage one is over, so the source may begin its next copy."""
        self._copying[migration.source] = None

    def arrive(self, migration: Migration) -> None:
        """The sample has arrived at its destination."""
        self._leave(migration)
        self.done += 1

    def overtake(self, sample: int) -> tuple[Migration, bool]:
        """Cancel the migration of a sample that ended at its source; also whether its copy was in progress."""
        migration = self.under_way[sample]
        self._leave(migration)
        migration.cancelled = True
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
