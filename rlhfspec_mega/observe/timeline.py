"""The timeline of a run for ui.perfetto.dev or chrome://tracing.

What each worker did when, and which samples migrated.
"""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhfspec_mega.observe.plot import LiveSamples
from rlhfspec_mega.types import MigrationEvent, Span

TIMELINE_FILE = "timeline.json"
LIMIT = 400_000  # events with the detail of engines and actors: some 60 MB, which viewers still open quickly
WITHOUT_DETAIL = 2  # multiple of LIMIT after which no events at all are recorded
BUFFERED = 1000  # events written at once
MARK = 50  # microseconds; drawn width of a departure or an arrival
_THREADS = 100_000  # most threads of a process: viewers expect thread numbers to be unique in the trace
# Nothing follows the closing bracket: Perfetto may take even white space there for an error.
_OPENING, _SEPARATOR, _CLOSING = b"[\n", b",\n", b"\n]"

_logger = logging.getLogger(__name__)


class Lane(NamedTuple):
    """A row of the timeline: thread `number` of a process."""

    process: int
    number: int
    process_name: str
    name: str

    @property
    def place(self) -> dict[str, int]:
        """The fields of an event that put it on this lane."""
        return {"pid": self.process, "tid": self.process * _THREADS + self.number}


DRIVER = Lane(1, 0, "driver", "phases")


def actor_lane(rank: int) -> Lane:
    """The row of an actor rank."""
    return Lane(2, rank, "actor", f"rank {rank}")


def reference_lane(replica: int) -> Lane:
    """The row of a replica of the reference on generation devices."""
    return Lane(3, replica, "reference", f"replica {replica}")


def engine_lane(rank: int, number: int) -> Lane:
    """A row of an engine: 0 for its work, 1 for when it was freed, 2 for samples that leave and arrive."""
    return Lane(4 + rank, number, f"engine {rank}", ("work", "freed", "migrations")[number])


def lane_of(process: int, thread: int) -> tuple[int, int]:
    """Process and row number of an event with this `pid` and `tid`."""
    return process, thread - process * _THREADS


class Timeline:
    """Gathers events on the driver and appends them to a file, see TraceFile.

    All times are seconds since the epoch, so that processes, and the parts of a resumed run, fit together. Slices of a
    lane follow each other: Perfetto leaves out one that overlaps the one before, so it is cut to begin where that one
    ends. A migration is an arrow, as long as the sample's downtime, from a mark at the source to one at the
    destination: arrows need a slice at either end, and decode steps only touch these moments. Marks at the
    same time are put one behind the other: of several slices that begin together, all arrows bind to one.

    After `limit` events no more spans of engines and actors are taken, after twice as many nothing is; the file says so
    when it happens. A file that cannot be written ends the timeline with a warning, never the run.
    """

    def __init__(self, path: Path, limit: int = LIMIT) -> None:
        self._path, self._limit = path, limit
        self._file = TraceFile(path)
        self._lines: list[str] = []
        self._known: set[Lane] = set()
        self._ends: dict[Lane, int] = defaultdict(int)  # of the last slice
        self._marks: dict[Lane, set[int]] = defaultdict(set)
        self._cuts: set[str] = set()
        self._broken = False
        self._live = LiveSamples()

    # What happens

    def phase(self, name: str, start: float, end: float) -> None:
        """Record a phase of the driver from start to end; can be given to PhaseTimer as `charged`."""
        if self._has_room(end):
            self._slice(DRIVER, name, start, end, {})

    def engine(self, rank: int, spans: Sequence[Span]) -> None:
        """What an engine did, in order of time: decode steps, prefills, work on its freed device."""
        self._spans(engine_lane(rank, 0), spans)

    def actor(self, rank: int, spans: Sequence[Span]) -> None:
        """What an actor rank did, in order of time."""
        self._spans(actor_lane(rank), spans)

    def reference(self, replica: int, spans: Sequence[Span]) -> None:
        """Record how a replica of the reference spent its time on devices that engines had freed, in order of time."""
        self._spans(reference_lane(replica), spans)

    def freed(self, rank: int, start: float, end: float) -> None:
        """An interval in which the rollout had no more samples for the engine."""
        self._live.freed.setdefault(rank, []).append((start, end))
        if self._has_room(end):
            self._slice(engine_lane(rank, 1), "freed", start, end, {})

    def live(self, rank: int, time: float, count: int) -> None:
        """The engine holds this many unfinished samples from now on."""
        if self._live.add(rank, time, count) and self._has_room(time):
            lane = engine_lane(rank, 0)
            self._event(lane, "C", "live", _microseconds(time), {"args": {"samples": count}})

    def migration(self, event: MigrationEvent) -> None:
        """A sample has migrated."""
        if not self._has_room(event.arrived):
            return
        arguments = {
            "sample": event.sample_id,
            "settled_bytes": event.settled_bytes,
            "delta_bytes": event.delta_bytes,
            "downtime_ms": 1000 * event.downtime,
        }
        source, destination = engine_lane(event.source, 2), engine_lane(event.destination, 2)
        left = self._mark(source, _microseconds(event.departed))
        came = self._mark(destination, max(_microseconds(event.arrived), left))  # an arrow points forward in time
        # Both ends carry the same id, name and category; it is one that no earlier part of the file has.
        flow = {"cat": "migration", "id": self._count, "args": arguments}
        # The slice first, as viewers may read events of one time in the order of the file.
        self._event(source, "X", "leaves", left, {"dur": MARK, "args": arguments})
        self._event(source, "s", "migration", left, flow)
        self._event(destination, "X", "arrives", came, {"dur": MARK, "args": arguments})
        self._event(destination, "f", "migration", came, flow | {"bp": "e"})  # e: ends in the slice around it

    def take_live(self) -> LiveSamples:
        """Live samples and freed engines since the last call."""
        taken, self._live = self._live, LiveSamples()
        return taken

    def flush(self) -> None:
        """Write the recorded events to the file."""
        if not self._broken:
            try:
                self._file.append(self._lines)
            except OSError as error:
                _logger.warning("The timeline %s ends here, as it cannot be written: %s.", self._path, error)
                self._broken = True
        self._lines.clear()

    # Events

    @property
    def _count(self) -> int:
        return self._file.events + len(self._lines)

    def _has_room(self, time: float, detail: bool = False) -> bool:
        """Whether another event may be recorded; the first refusal is noted in the file."""
        most = self._limit * (1 if detail else WITHOUT_DETAIL)
        if self._count < most:
            return True
        words = f"{'Spans of engines and actors end' if detail else 'The timeline ends'} here: more than {most} events."
        if words not in self._cuts:
            self._cuts.add(words)
            self._event(DRIVER, "i", words, _microseconds(time), {"s": "g"})
            self._describe(DRIVER, "process_labels", labels=" ".join(sorted(self._cuts)))
        return False

    def _spans(self, lane: Lane, spans: Sequence[Span]) -> None:
        for span in spans:
            if not self._has_room(span.start, detail=True):
                return
            self._slice(lane, span.name, span.start, span.start + span.seconds, span.arguments)

    def _slice(
        self, lane: Lane, name: str, start: float, end: float, arguments: Mapping[str, float | int | str]
    ) -> None:
        first, last = max(_microseconds(start), self._ends[lane]), _microseconds(end)
        if first < last:
            self._ends[lane] = last
            self._event(lane, "X", name, first, {"dur": last - first, "args": _in_json(arguments)})

    def _mark(self, lane: Lane, time: int) -> int:
        """The nearest free place for a mark at this time, or less than a mark's width before it."""
        taken, place = self._marks[lane], time // MARK
        while place in taken:
            place += 1
        taken.add(place)
        return place * MARK

    def _event(self, lane: Lane, kind: str, name: str, time: int, rest: dict[str, Any]) -> None:
        if lane not in self._known:
            self._known.add(lane)
            self._introduce(lane)
        self._write({"ph": kind, "name": name, "ts": time} | lane.place | rest)

    def _introduce(self, lane: Lane) -> None:
        """Write name and order of a lane."""
        self._describe(lane, "process_name", name=lane.process_name)
        self._describe(lane, "process_sort_index", sort_index=lane.process)
        self._describe(lane, "thread_name", name=lane.name)
        self._describe(lane, "thread_sort_index", sort_index=lane.number)

    def _describe(self, lane: Lane, kind: str, /, **arguments: str | int) -> None:
        """Write metadata, which has no time."""
        self._write({"ph": "M", "name": kind} | lane.place | {"args": arguments})

    def _write(self, event: dict[str, Any]) -> None:
        self._lines.append(json.dumps(event, separators=(",", ":"), allow_nan=False))
        if len(self._lines) >= BUFFERED:
            self.flush()


def _microseconds(seconds: float) -> int:
    # Whole ones: a double still holds them exactly, and slices that touch go on touching.
    return round(seconds * 1e6)


def _in_json(arguments: Mapping[str, float | int | str]) -> dict[str, float | int | str]:
    """Arguments with infinity and NaN, which JSON lacks, as words."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in arguments.items()
    }


class TraceFile:
    """The array form of the Trace Event Format, which chrome://tracing and ui.perfetto.dev read: one event per line.

    Replacing the whole file whenever something is added would cost the square of a run's length, so the file is
    written in place: new events take the place of the closing bracket and end with another one. Between two calls the
    file is plain JSON. A crash in the middle of one leaves a file without its end. The format allows for that: the
    bracket is optional and a comma before it is dropped, so that only an unfinished last line must go. A resumed run
    does so when it opens the file again; Perfetto, which wants the bracket, reads it from then on.

    Attributes:
        events: in the file.
    """

    def __init__(self, path: Path) -> None:
        """The file appears with the first events; one that is there already is continued."""
        self._path = path
        self.events, self._end = _whole(path.read_bytes()) if path.is_file() else (0, 0)

    def append(self, events: Sequence[str]) -> None:
        """Add events, each of them a JSON object on one line. Raises OSError where that cannot be written."""
        if not events:
            return
        text = (_SEPARATOR if self.events else _OPENING) + _SEPARATOR.join(event.encode() for event in events)
        with self._path.open("r+b" if self.events else "wb") as file:
            file.seek(self._end)
            file.write(text + _CLOSING)
            file.truncate()
        self._end += len(text)
        self.events += len(events)


def _whole(data: bytes) -> tuple[int, int]:
    """Number of whole events in a file, and where the last of them ends."""
    lines = data.split(b"\n")
    while lines and not _is_event(lines[-1]):
        lines.pop()
    if not lines:
        return 0, 0
    return len(lines) - 1, len(b"\n".join(lines).rstrip(b",]"))  # the first line is the opening bracket


def _is_event(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line.rstrip(b",]")), dict)
    except ValueError:
        return False
