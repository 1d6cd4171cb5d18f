"""Stopping ahead of the end of a job."""

from __future__ import annotations

import pytest

from rlhfspec_mega import stop
from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.config.machine import check_job_end
from rlhfspec_mega.errors import UserError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which a test may set."""
    now = [1000.0]
    monkeypatch.setattr(stop.time, "time", lambda: now[0])
    monkeypatch.delenv(stop.JOB_END, raising=False)
    return now


def steps_done(end: stop.JobEnd, clock: list[float], durations: list[float]) -> list[bool]:
    found = []
    for seconds in durations:
        clock[0] += seconds
        found.append(end.reached())
    return found


def test_the_next_step_is_taken_to_be_as_long_as_the_longest(clock: list[float]) -> None:
    end = stop.JobEnd(seconds=10, time_limit=100, began=1000.0)  # the checkpoint must begin at 1090
    assert steps_done(end, clock, [20, 30, 5, 5, 1]) == [False, False, False, False, True]


def test_slurm_says_when_the_job_ends(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(stop.JOB_END, "1050")
    assert steps_done(stop.JobEnd(10, 0, 0.0), clock, [15, 15]) == [False, True]
    assert steps_done(stop.JobEnd(0, 0, 0.0), clock, [500]) == [False]


def test_the_limit_counts_from_the_start_of_the_process_and_a_recovery_is_no_step(clock: list[float]) -> None:
    end = stop.JobEnd(seconds=10, time_limit=160, began=940.0)  # the checkpoint must begin at 1090
    assert steps_done(end, clock, [10]) == [False]
    clock[0] += 60.0
    end.steps_begin()
    assert steps_done(end, clock, [10, 9]) == [False, True]


def test_an_end_that_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(stop.JOB_END, raising=False)
    with pytest.raises(UserError, match=r"add trainer\.time_limit=SECONDS"):
        check_job_end(load_config(["trainer.save_before_end=60"]))
    check_job_end(load_config(["trainer.save_before_end=60", "trainer.time_limit=600"]))
    monkeypatch.setenv(stop.JOB_END, "1050")
    check_job_end(load_config(["trainer.save_before_end=60"]))
    monkeypatch.setenv(stop.JOB_END, "Unknown")
    with pytest.raises(UserError, match="SLURM_JOB_END_TIME=Unknown is no number"):
        check_job_end(load_config(["trainer.save_before_end=60"]))
