"""What a rollout's manager notes of the long tail: for the timeline, and summed up for the summary."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from rlhfspec_mega.observe.timeline import Timeline
from rlhfspec_mega.rollout.scoring import ScoreReport
from rlhfspec_mega.types import MigrationEvent, Span, TailTally


class Journal:
    """Follows live samples, migrations and freed time of the engines of one rollout after another."""

    def __init__(self, timeline: Timeline | None) -> None:
        self._timeline = timeline
        self._empty: dict[int, float] = {}  # engines without samples, since when
        self._tally = TailTally()
        self._ended = 0.0  # when the last sample of the latest rollout had

    def begin(self, ranks: Sequence[int]) -> None:
        """A rollout begins on these engines."""
        self._empty, self._ended = dict.fromkeys(ranks, time.time()), math.inf

    def live(self, rank: int, count: int) -> None:
        """An engine has so many samples from now on."""
        now = time.time()
        if count:
            self._fill(rank, now)
        else:
            self._empty.setdefault(rank, now)
        if self._timeline:
            self._timeline.live(rank, now, count)

    def gone(self, rank: int) -> None:
        """An engine died: it is not free, it is not there."""
        self._empty.pop(rank, None)
        if self._timeline:
            self._timeline.live(rank, time.time(), 0)

    def decoded(self, rank: int, spans: Sequence[Span], count: int) -> None:
        """An engine has answered, with so many samples left."""
        if self._timeline:
            self._timeline.engine(rank, spans)
        self.live(rank, count)

    def moved(self, events: Sequence[MigrationEvent]) -> None:
        """Samples have moved; of those that had tokens, how long they were not decoded."""
        for event in events:
            self._tally.migrations += 1
            if event.begun:
                self._tally.downtimes.append(event.downtime)
            if self._timeline:
                self._timeline.migration(event)

    def scored(self, report: ScoreReport) -> None:
        """A batch was scored: in freed time, if that began while engines were still decoding."""
        span = report.span
        if span.start < self._ended:
            self._tally.fused_tasks += int(span.arguments["samples"])
            self._tally.fused_seconds += min(span.seconds, self._ended - span.start)
        if self._timeline:
            self._timeline.reference(report.replica, [span])

    def end(self) -> None:
        """All samples have ended: engines that were empty before had been freed. Later calls do nothing."""
        now = time.time()
        self._ended = min(self._ended, now)
        for rank in list(self._empty):
            self._fill(rank, now)

    def take(self) -> TailTally:
        """What was summed up since the last call."""
        taken, self._tally = self._tally, TailTally()
        return taken

    def _fill(self, rank: int, now: float) -> None:
        """The engine is empty no longer."""
        since = self._empty.pop(rank, now)
        self._tally.freed_device_seconds += now - since
        if self._timeline and now > since:
            self._timeline.freed(rank, since, now)
