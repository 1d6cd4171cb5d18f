"""An engine as a fluid: all its live samples gain tokens at one rate, which changes only when something happens.

Migrations between engines: one stage-one copy at a time out of an engine, then the downtime of stage two.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from rlhfspec_mega.simulate.curves import DecodeCurve

SAME_TOKEN = 1e-6  # tokens by which two ends may differ and still be one event: sums of floats


@dataclass(frozen=True)
class Share:
    """A sample as an engine takes it.

    Attributes:
        left: tokens still to decode.
        total: tokens of prompt and response once it has ended.
        prefill: prompt tokens to read first, unless its group's were read here; 0 for one that brings its KV.
    """

    sample: int
    group: int
    left: float
    total: float
    prefill: int


class FluidEngine:
    """Decodes up to `slots` samples at once; the others wait, those that bring their KV before the rest.

    Between two events a batch of B samples gains g tokens each in a * g + c * (kv * g + B * g^2 / 2) seconds, as its KV
    grows from `kv` by B per token; a and c are the curve's seconds and kv_seconds at B. Reading
    prompts stops decoding for as long as it takes.

    Attributes:
        live: what `level` will be when a sample ends, by sample.
        waiting: shares that hold no slot, first to go first.
        level: tokens that a sample live since the beginning would have gained by `time`.
        decoded: tokens gained by all samples.
        kv, kv_peak: tokens in the KV cache, now and at most.
        last_held: when it last held a sample.
        copies: stage-one copies that it takes part in.
    """

    def __init__(self, rank: int, slots: int, curve: DecodeCurve, prefill_seconds: float, copy_share: float) -> None:
        self.rank, self.slots = rank, slots
        self.live: dict[int, float] = {}
        self.waiting: dict[int, Share] = {}
        self.level = self.decoded = self.kv = self.kv_peak = self.time = self.last_held = 0.0
        self.copies = 0
        self._totals: dict[int, float] = {}
        self._ends: list[tuple[float, int]] = []  # heap; entries of samples that moved away stay until they come up
        self._token_seconds, self._kv_seconds = curve.tables(slots)
        self._prefill_seconds, self._read = prefill_seconds, set[int]()
        self._copy_load = copy_share / (1.0 - copy_share)  # copying seconds beside each second of decoding
        self._stalled_until = 0.0

    @property
    def empty(self) -> bool:
        return not self.live and not self.waiting

    def advance(self, now: float) -> None:
        """Decode until `now`, before which no sample ends."""
        seconds = now - max(self.time, min(self._stalled_until, now))
        if not self.empty:
            self.last_held = now
        self.time = now
        if self.live and seconds > 0:
            self._gain(self._tokens_in(seconds))

    def next_end(self) -> float | None:
        """When the next sample ends if nothing else happens; None without live samples."""
        while self._ends and self.live.get(self._ends[0][1]) != self._ends[0][0]:
            heapq.heappop(self._ends)
        if not self._ends:
            return None
        return max(self.time, self._stalled_until) + self._seconds_for(self._ends[0][0] - self.level)

    def end(self, now: float) -> list[int]:
        """Samples that end at `now`, which `next_end` has announced, in order; their slots are free."""
        self.advance(now)
        level = self._ends[0][0]
        self._gain(level - self.level)  # what rounding left
        ended = []
        while self._ends and self._ends[0][0] <= level + SAME_TOKEN:
            end, sample = heapq.heappop(self._ends)
            if self.live.get(sample) == end:
                ended.append(sample)
                self._leave(sample)
        return ended

    def take(self, share: Share) -> None:
        """Queue a sample; `admit` gives it a slot."""
        if share.prefill:
            self.waiting[share.sample] = share
        else:
            self.waiting = {share.sample: share} | self.waiting

    def admit(self) -> None:
        """Fill free slots from those waiting, as of `time`."""
        while self.waiting and len(self.live) < self.slots:
            share = self.waiting.pop(next(iter(self.waiting)))
            if share.prefill and share.group not in self._read:
                self._read.add(share.group)
                self._stalled_until = max(self._stalled_until, self.time) + share.prefill * self._prefill_seconds
            end = self.level + share.left
            self.live[share.sample], self._totals[share.sample] = end, share.total
            heapq.heappush(self._ends, (end, share.sample))
            self.kv += share.total - share.left
        self.kv_peak = max(self.kv_peak, self.kv)

    def left(self, sample: int) -> float:
        """Tokens that a sample here still has to decode, as of `time`."""
        return self.waiting[sample].left if sample in self.waiting else self.live[sample] - self.level

    def withdraw(self, sample: int) -> float:
        """Take an unfinished sample away, live or waiting, as of `time`; the tokens it still has to decode."""
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
        """The inverse of `_seconds_for`: the root of a quadratic, in the form that also holds without growth."""
        pace, growth = self._pace()
        return 2.0 * seconds / (pace + math.sqrt(pace * pace + 2.0 * growth * seconds))

    def _pace(self) -> tuple[float, float]:
        """Seconds of the next token, and by how much they grow with each."""
        batch = len(self.live)
        stretch, kv_seconds = 1.0 + self.copies * self._copy_load, self._kv_seconds[batch]
        return stretch * (self._token_seconds[batch] + kv_seconds * self.kv), stretch * kv_seconds * batch


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
