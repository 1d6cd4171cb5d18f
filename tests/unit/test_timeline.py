"""Timeline: a viewer shows all that is in the file, whatever happened; phases and live samples reach it."""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfspec_mega.observe.plot import LiveSamples, plot_live_samples
from rlhfspec_mega.observe.spans import PhaseTimer
from rlhfspec_mega.observe.timeline import LIMIT, MARK, Timeline
from rlhfspec_mega.types import MigrationEvent, Span

NOW = 1_790_000_000.0  # seconds since the epoch, so that times have as many digits as in a run
Event = dict[str, Any]


class Slice(NamedTuple):
    lane: tuple[str, str]
    name: str
    start: int
    end: int
    arguments: Event


class Viewed(NamedTuple):
    """What a viewer shows; `lost` are events it leaves out without a word."""

    slices: list[Slice]
    arrows: list[tuple[Slice, Slice]]
    lost: list[Event]


def viewed(events: list[Event], as_written: bool = False) -> Viewed:
    """The rules of Perfetto's importer, in its order: sort by time, then thread by thread a stack of slices; one that
    ends after the slice around it is dropped; arrows bind to the innermost slice.

    Args:
        as_written: events of one time stay in the order of the file; else slices come first, the longest before others.
    """
    names: dict[str, dict[int, str]] = {"process_name": {}, "thread_name": {}}
    for event in events:
        if event["ph"] == "M" and event["name"] in names:
            names[event["name"]][event["pid" if event["name"] == "process_name" else "tid"]] = event["args"]["name"]
    found, stacks, begun = Viewed([], [], []), defaultdict[int, list[Slice]](list), dict[Any, Slice]()
    timed = sorted((event for event in events if event["ph"] in "Xsf"), key=lambda event: event["ts"])
    if not as_written:
        timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    for event in timed:
        stack, time = stacks[event["tid"]], event["ts"]
        while stack and stack[-1].end <= time:
            stack.pop()
        if event["ph"] == "X":
            lane = (names["process_name"][event["pid"]], names["thread_name"][event["tid"]])
            new = Slice(lane, event["name"], time, time + event["dur"], event["args"])
            if new.end <= time or (stack and stack[-1].end < new.end):
                found.lost.append(event)
            else:
                stack.append(new)
                found.slices.append(new)
            continue
        key = (event["id"], event["cat"], event["name"])
        if not stack or (event["ph"] == "s") == (key in begun):
            found.lost.append(event)
        elif event["ph"] == "s":
            begun[key] = stack[-1]
        else:
            assert event["bp"] == "e"
            found.arrows.append((begun.pop(key), stack[-1]))
    found.lost.extend({"ph": "s", "of": unfinished} for unfinished in begun.values())
    found.slices.sort(key=lambda one: one[:4])
    found.arrows.sort(key=lambda arrow: arrow[0][:4])
    return found


def read(path: Path) -> list[Event]:
    return json.loads(path.read_text(encoding="utf-8"))


def decode(start: float, seconds: float, batch: int = 4) -> Span:
    return Span("decode", start, seconds, {"batch": batch, "steps": 3, "draft_tokens": 40})


# Times in units of 10 us, on few values: collisions, overlaps and clocks that step back are the rule.
times = st.integers(0, 60).map(lambda tick: NOW + tick * 1e-5)
durations = st.integers(0, 30).map(lambda tick: tick * 1e-5)
ranks = st.integers(0, 2)
happenings = st.lists(
    st.one_of(
        st.tuples(st.just("engine"), ranks, st.lists(st.builds(decode, times, durations), max_size=4)),
        st.tuples(st.just("actor"), ranks, st.lists(st.builds(decode, times, durations), max_size=4)),
        st.tuples(st.just("phase"), times, durations),
        st.tuples(st.just("freed"), ranks, times, durations),
        st.tuples(st.just("live"), ranks, times, st.integers(0, 3)),
        st.tuples(st.just("migration"), ranks, ranks, times, durations),
    ),
    max_size=40,
)


def tell(timeline: Timeline, happening: tuple[Any, ...], number: int) -> None:
    match happening:
        case ("engine", rank, spans):
            timeline.engine(rank, spans)
        case ("actor", rank, spans):
            timeline.actor(rank, spans)
        case ("phase", start, seconds):
            timeline.phase("generate", start, start + seconds)
        case ("freed", rank, start, seconds):
            timeline.freed(rank, start, start + seconds)
        case ("live", rank, time, count):
            timeline.live(rank, time, count)
        case ("migration", source, destination, departed, downtime):
            timeline.migration(
                MigrationEvent(str(number), source, destination, departed, departed + downtime, 1000, 10)
            )


@settings(max_examples=150, deadline=None)
@given(happenings)
def test_a_viewer_shows_everything_that_is_in_the_file(happened: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "timeline.json"
        timeline = Timeline(path)
        for number, happening in enumerate(happened):
            tell(timeline, happening, number)
            if number % 7 == 0:
                timeline.flush()
        timeline.flush()
        events = read(path) if path.exists() else []
    found = viewed(events)
    assert found == viewed(events, as_written=True)
    assert found.lost == []
    moves = {str(number): what for number, what in enumerate(happened) if what[0] == "migration"}
    assert len(found.arrows) == len(moves)
    for left, came in found.arrows:
        assert left.arguments == came.arguments
        _, source, destination, departed, downtime = moves[left.arguments["sample"]]
        assert (left.lane[0], came.lane[0]) == (f"engine {source}", f"engine {destination}")
        assert left.name == "leaves" and came.name == "arrives" and left.start <= came.start
        for mark, moment in ((left, departed), (came, departed + downtime)):
            assert -MARK <= mark.start - moment * 1e6 <= MARK * 2 * len(moves)


def test_spans_that_follow_each_other_are_shown_as_they_were(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    starts = NOW + np.cumsum(random.uniform(0.001, 0.02, 50))
    spans = [decode(a, (b - a) * random.choice([0.5, 1.0])) for a, b in pairwise(starts.tolist())]
    timeline = Timeline(tmp_path / "t.json")
    timeline.actor(5, spans[:20])
    timeline.actor(5, spans[20:])
    timeline.phase("generate", NOW, NOW + 2)
    timeline.freed(7, NOW + 1, NOW + 2)
    timeline.flush()
    found = viewed(read(tmp_path / "t.json"))
    assert [one[:2] for one in found.slices if one.lane != ("actor", "rank 5")] == [
        (("driver", "phases"), "generate"),
        (("engine 7", "freed"), "freed"),
    ]
    mine = [one for one in found.slices if one.lane == ("actor", "rank 5")]
    assert [one.arguments for one in mine] == [span.arguments for span in spans]
    for shown, span in zip(mine, spans, strict=True):
        assert shown.start == pytest.approx(span.start * 1e6, abs=1)
        assert shown.end - shown.start == pytest.approx(span.seconds * 1e6, abs=2)


def test_a_migration_is_an_arrow_as_long_as_its_downtime(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.json")
    for number in range(30):  # a wave: all leave and arrive at once
        timeline.migration(MigrationEvent(f"3.1.{number}", 0, 1, NOW, NOW + 0.02, 4_000_000, 20_000))
    timeline.flush()
    found = viewed(read(tmp_path / "t.json"))
    assert not found.lost and len(found.arrows) == 30
    assert all(came.start - left.start == pytest.approx(20_000, abs=MARK) for left, came in found.arrows)
    expected = {"settled_bytes": 4_000_000, "delta_bytes": 20_000, "downtime_ms": pytest.approx(20.0, abs=1e-3)}
    assert [left.arguments for left, _ in found.arrows] == [
        expected | {"sample": f"3.1.{number}"} for number in range(30)
    ]


def test_threads_are_numbered_for_the_whole_trace_and_named(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.json")
    timeline.phase("update", NOW, NOW + 1)
    for rank in (0, 1, 999):
        timeline.engine(rank, [decode(NOW, 1.0)])
        timeline.actor(rank, [decode(NOW, 1.0)])
        timeline.freed(rank, NOW, NOW + 1)
    timeline.flush()
    events = read(tmp_path / "t.json")
    processes = {(event["tid"], event["pid"]) for event in events}
    assert len(processes) == len({tid for tid, _ in processes}) == 10
    lanes = [one.lane for one in viewed(events).slices]
    assert len(lanes) == len(set(lanes)) == 10
    assert {("engine 999", "work"), ("engine 999", "freed"), ("actor", "rank 999"), ("driver", "phases")} <= set(lanes)


def test_numbers_that_json_lacks_are_written_in_words(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.json")
    timeline.engine(0, [Span("decode", NOW, 1.0, {"rate": float("nan"), "batch": 2})])
    timeline.flush()
    text = (tmp_path / "t.json").read_text()
    events = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert [event["args"] for event in events if event["ph"] == "X"] == [{"rate": "nan", "batch": 2}]


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for part in range(3):
        timeline = Timeline(path)
        start = NOW + 100 * part
        timeline.engine(0, [decode(start, 1.0)])
        timeline.migration(MigrationEvent("1.1.1", 0, 1, start + 1, start + 2, 5, 5))
        timeline.flush()
    found = viewed(read(path))
    assert not found.lost and len(found.arrows) == 3
    assert [one.start for one in found.slices if one.name == "decode"] == [
        round((NOW + 100 * part) * 1e6) for part in range(3)
    ]


def test_a_full_timeline_says_so_and_goes_on_without_detail_first(tmp_path: Path) -> None:
    path, limit = tmp_path / "t.json", 60
    timeline = Timeline(path, limit)
    spans = [decode(NOW + step, 1.0) for step in range(500)]
    for step in range(500):
        timeline.engine(0, spans[step : step + 1])
        timeline.actor(0, spans[step : step + 1])
        if step >= 100:
            timeline.phase("generate", NOW + step, NOW + step + 1)
        if step == 200:
            timeline.flush()
            early = read(path)
    timeline.flush()
    events = read(path)
    detail = [one for one in viewed(events).slices if one.name == "decode"]
    phases = [one for one in viewed(events).slices if one.name == "generate"]
    assert limit - 20 < len(detail) <= limit and len(phases) > limit / 2
    assert 2 * limit <= len(events) < 2 * limit + 10
    said = [[one["name"] for one in part if one["ph"] == "i"] for part in (early, events)]
    first = f"Spans of engines and actors end here: more than {limit} events."
    assert said[1] == [first, f"The timeline ends here: more than {2 * limit} events."]
    labels = [one["args"]["labels"] for one in events if one["name"] == "process_labels"]
    assert labels[0] == first and all(words in labels[1] for words in said[1])
    live = timeline.take_live()
    assert not live.counts and not live.freed


def test_a_file_that_cannot_be_written_ends_the_timeline_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    timeline = Timeline(tmp_path / "missing" / "t.json")
    for step in range(5000):
        timeline.engine(0, [decode(NOW + step, 1.0)])
    timeline.flush()
    assert [record.getMessage() for record in caplog.records] == [
        f"The timeline {tmp_path / 'missing' / 't.json'} ends here, as it cannot be written: [Errno 2] No such file or "
        f"directory: '{tmp_path / 'missing' / 't.json'}'."
    ]


def test_the_limit_leaves_a_file_that_viewers_open_quickly(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.json")
    timeline.engine(123, [decode(NOW + step, 0.123456, 16) for step in range(2000)])
    timeline.flush()
    assert (tmp_path / "t.json").stat().st_size / 2000 * LIMIT < 70e6


# Phases and live samples


def test_phases_reach_the_timeline_as_they_are_charged(tmp_path: Path) -> None:
    now = [100.0]
    timeline = Timeline(tmp_path / "t.json")
    stretches: list[tuple[str, float]] = []
    ends = [time.time()]

    def charged(name: str, start: float, end: float) -> None:
        stretches.append((name, end - start))
        ends.append(end)
        timeline.phase(name, start, end)

    phases = PhaseTimer(clock=lambda: now[0], charged=charged)
    with phases.measure("generate"):
        now[0] += 2
        with phases.measure("score"):
            now[0] += 3
        now[0] += 1
    now[0] += 7
    with pytest.raises(RuntimeError), phases.measure("update"):
        now[0] += 4
        raise RuntimeError
    assert stretches == [
        (name, pytest.approx(seconds))
        for name, seconds in [("generate", 2), ("score", 3), ("generate", 1), ("update", 4)]
    ]
    ends.append(time.time())
    assert ends == sorted(ends)
    timeline.flush()
    assert viewed(read(tmp_path / "t.json")).lost == []


def test_live_samples_are_counters_where_they_change_and_are_taken_per_rollout(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.json")
    for second, count in enumerate([4, 4, 3, 3, 0]):
        timeline.live(0, NOW + second, count)
        timeline.live(1, NOW + second, 2)
    timeline.freed(1, NOW + 2, NOW + 4)
    first = timeline.take_live()
    timeline.live(0, NOW + 9, 0)
    assert first.counts == {0: [(NOW, 4), (NOW + 2, 3), (NOW + 4, 0)], 1: [(NOW, 2)]}
    assert first.freed == {1: [(NOW + 2, NOW + 4)]}
    assert timeline.take_live().counts == {0: [(NOW + 9, 0)]}
    timeline.flush()
    counters = [event for event in read(tmp_path / "t.json") if event["ph"] == "C"]
    mine = [event["args"]["samples"] for event in counters if event["pid"] == counters[0]["pid"]]
    assert mine == [4, 3, 0, 0] and len(counters) == 5


def pixels(directory: Path, rollout: LiveSamples) -> np.ndarray:
    from matplotlib import image

    return image.imread(plot_live_samples(directory, rollout))[..., :3]


def test_the_picture_shows_lines_of_engines_and_hatches_what_was_freed(tmp_path: Path) -> None:
    counts = {0: [(NOW, 4), (NOW + 3, 0)], 1: [(NOW, 6), (NOW + 5, 0)]}
    plain = pixels(tmp_path, LiveSamples(counts))
    hatched = pixels(tmp_path, LiveSamples(counts, {0: [(NOW + 3, NOW + 5)]}))
    longer = pixels(tmp_path, LiveSamples({**counts, 0: [(NOW, 4), (NOW + 4, 0)]}))
    assert plain.shape == hatched.shape and plain.std() > 0
    height, width = plain.shape[:2]
    rows, columns = np.nonzero((plain != hatched).any(axis=2))
    assert rows.min() > height / 2 and columns.min() > width / 2  # below, and late
    rows, _ = np.nonzero((plain != longer).any(axis=2))
    assert rows.max() < 0.9 * height and rows.min() < height / 2
    many = {rank: [(NOW, 8), (NOW + rank / 10, 0)] for rank in range(100)}
    assert pixels(tmp_path, LiveSamples(many, {3: [(NOW, NOW + 1)]})).shape[0] < 1500
