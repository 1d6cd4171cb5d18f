"""Records live samples, migrations and freed devices of rollouts, for the timeline and as sums for the summary."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from rlhfspec_mega.observe.timeline import Timeline
from rlhfspec_mega.rollout.scoring import ScoreReport
from rlhfspec_mega.types import MigrationEvent, Span, TailTally


class Journal:
    """Records live samples, migrations and freed device time of one rollout after another."""

    def __init__(self, timeline: Timeline | None) -> None:
        self._timeline = timeline
        self._empty: dict[int, float] = {}  # ranks of engines without samples, and time.time() since when
        self._tally = TailTally()
        self._ended = 0.0  # time.time() when the last sample of the latest rollout ended

    def begin(self, ranks: Sequence[int]) -> None:
        """Start a rollout on the engines of these ranks."""
        self._empty, self._ended = dict.fromkeys(ranks, time.time()), math.inf

    def live(self, rank: int, count: int) -> None:
        """Record that an engine now has `count` samples."""
        now = time.time()
        if count:
            self._fill(rank, now)
        else:
            self._empty.setdefault(rank, now)
        if self._timeline:
            self._timeline.live(rank, now, count)

    def gone(self, rank: int) -> None:
        """Record that an engine died; a dead engine does not count as freed."""
        self._empty.pop(rank, None)
        if self._timeline:
            self._timeline.live(rank, time.time(), 0)

    def decoded(self, rank: int, spans: Sequence[Span], count: int) -> None:
        """Record the spans of an engine's report, after which it has `count` samples."""
        if self._timeline:
            self._timeline.engine(rank, spans)
        self.live(rank, count)

    def moved(self, events: Sequence[MigrationEvent]) -> None:
        """Record completed migrations, and the downtime of samples that already had response tokens."""
        for event in events:
            self._tally.migrations += 1
            if event.begun:
                self._tally.downtimes.append(event.downtime)
            if self._timeline:
                self._timeline.migration(event)

    def scored(self, report: ScoreReport) -> None:
        """Record a scored batch; it counts as fused if it was started while engines were still decoding."""
        span = report.span
        if span.start < self._ended:
            self._tally.fused_tasks += int(span.arguments["samples"])
            self._tally.fused_seconds += min(span.seconds, self._ended - span.start)
        if self._timeline:
            self._timeline.reference(report.replica, [span])

    def end(self) -> None:
        """Record that all samples have ended, up to which empty engines count as freed. Later calls do nothing."""
        now = time.time()
        self._ended = min(self._ended, now)
        for rank in list(self._empty):
            self._fill(rank, now)

    def take(self) -> TailTally:
        """The sums since the last call."""
        taken, self._tally = self._tally, TailTally()
        return taken

    def _fill(self, rank: int, now: float) -> None:
        """Add the time that an engine was empty to the freed time."""
        since = self._empty.pop(rank, now)
        self._tally.freed_device_seconds += now - since
        if self._timeline and now > since:
            self._timeline.freed(rank, since, now)
