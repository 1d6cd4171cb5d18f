"""The recorder of spans: against grouping by hand, and what it keeps when it is full."""

from __future__ import annotations

from itertools import groupby, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfspec_mega.observe.spans import SpanRecorder

NOW = 1_790_000_000.0  # seconds since the epoch, so that times have as many digits as in a run

steps = st.lists(
    st.tuples(st.sampled_from(["decode", "prefill"]), st.integers(1, 3), st.integers(0, 9), st.sampled_from([0, 0, 5])),
    max_size=60,
)


def record(recorder: SpanRecorder, recorded: list[tuple[str, int, int, int]]) -> list[float]:
    """Steps of 1 ms, each with what was idle (in ms) before it; the middle of each."""
    now, middles = NOW, []
    for name, batch, tokens, idle in recorded:
        now += idle * 1e-3
        recorder.add(name, now, now + 1e-3, batch=batch, steps=1, tokens=tokens)
        middles.append(now + 5e-4)
        now += 1e-3
    return middles


@given(steps)
def test_steps_of_one_batch_size_become_one_span(recorded: list[tuple[str, int, int, int]]) -> None:
    recorder = SpanRecorder()
    record(recorder, recorded)
    breaks = np.cumsum([step[3] > 0 for step in recorded]).tolist()
    runs = [
        [step for _, step in run]
        for _, run in groupby(zip(breaks, recorded, strict=True), key=lambda entry: (entry[0], *entry[1][:2]))
    ]
    spans = recorder.take()
    assert [(span.name, span.arguments) for span in spans] == [
        (run[0][0], {"batch": run[0][1], "steps": len(run), "tokens": sum(step[2] for step in run)}) for run in runs
    ]
    assert [span.seconds for span in spans] == pytest.approx([len(run) * 1e-3 for run in runs], abs=1e-5)
    assert recorder.take() == []


@given(steps, st.integers(2, 9))
def test_a_full_recorder_keeps_amounts_and_times(recorded: list[tuple[str, int, int, int]], limit: int) -> None:
    recorder = SpanRecorder(limit)
    middles = record(recorder, recorded)
    spans = recorder.take()
    assert len(spans) <= limit
    assert sum(int(span.arguments["steps"]) for span in spans) == len(recorded)
    assert sum(int(span.arguments["tokens"]) for span in spans) == sum(step[2] for step in recorded)
    assert max((span.arguments["batch"] for span in spans), default=0) == max((step[1] for step in recorded), default=0)
    assert {name for span in spans for name in span.name.split(" + ")} == {step[0] for step in recorded}
    assert all(one.start + one.seconds <= other.start + 1e-6 for one, other in pairwise(spans))
    assert all(any(span.start < middle < span.start + span.seconds for span in spans) for middle in middles)
    if spans:
        whole = middles[-1] - middles[0] + 1e-3
        assert spans[-1].start + spans[-1].seconds - spans[0].start == pytest.approx(whole, abs=1e-5)


def test_tasks_on_different_samples_stay_apart_and_failures_are_recorded() -> None:
    recorder = SpanRecorder()
    for sample in ("3.0.1", "3.0.1", "3.0.2"):
        recorder.add("reference", NOW, NOW + 1, sample=sample, tokens=100)
    with pytest.raises(RuntimeError), recorder.measure("update", batches=3):
        raise RuntimeError
    spans = recorder.take()
    assert [(span.name, span.arguments) for span in spans] == [
        ("reference", {"sample": "3.0.1", "tokens": 200}),
        ("reference", {"sample": "3.0.2", "tokens": 100}),
        ("update", {"batches": 3}),
    ]
    joined = SpanRecorder(limit=2)
    for span in spans:
        joined.add(span.name, span.start, span.start + span.seconds, **span.arguments)
    assert [span.arguments for span in joined.take()] == [{"tokens": 300}, {"batches": 3}]
