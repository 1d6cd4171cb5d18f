"""When the draft learns: in every due step while that gains time, seldom while it costs more."""

from __future__ import annotations

import pytest

from rlhfspec_mega.planning.refresh_schedule import BLOCK, RefreshSchedule


def observe(
    schedule: RefreshSchedule, share: float, steps: int = BLOCK, cost: float = 0.5, refreshes: bool = True
) -> list[str]:
    """Steps of ten seconds of generation, in which the draft model gave this share of the tokens."""
    notes = []
    for _ in range(steps):
        tokens = {"sample_steps": 400.0, "accepted": 600.0, "recalled": 600.0 - 1000.0 * share}
        metrics = {f"speculation/{name}": value for name, value in tokens.items()}
        if refreshes:
            metrics["draft/refresh_kept"] = 0.0
        passes = {"draft": cost / 2 if refreshes else 0.0, "logprobs": cost / 2}
        notes += schedule.observe({"generate": 10.0, **passes}, metrics)
    return notes


def due(schedule: RefreshSchedule, steps: int = 64) -> list[int]:
    return [step for step in range(steps) if schedule.due(step)]


def usual(every: int = 4, needs_pass: bool = True, backs_off: bool = True) -> RefreshSchedule:
    return RefreshSchedule(every, 2.0, backs_off=backs_off, needs_pass=needs_pass)


def test_a_draft_that_gains_more_than_it_costs_learns_in_every_due_step() -> None:
    schedule = usual()
    assert observe(schedule, 0.06, 20) == [] and not schedule.rare
    assert due(schedule) == list(range(3, 64, 4)) and all(map(schedule.needs_states, range(64)))


def test_a_draft_that_gives_nothing_does_not_even_learn_once() -> None:
    """The first comparison comes before the first refresh: with the time that one is allowed, and passes as measured.

    2 s in four steps and 0.1 s a step are 0.6 s, of steps of 10.1 s: every 24th step, they take 1%.
    """
    schedule = usual()
    assert observe(schedule, 0.059, 2, cost=0.2, refreshes=False) == []
    (note,) = observe(schedule, 0.059, 1, cost=0.2, refreshes=False)
    assert "saves at most 0.59 s a step and learning costs 0.6 s" in note
    assert due(schedule, 72) == [23, 47, 71] and not schedule.needs_states(3)
    schedule = usual()
    assert observe(schedule, 0.061, 3, cost=0.2, refreshes=False) == [] and due(schedule)[0] == 3
    assert RefreshSchedule(1, 2.0, backs_off=True, needs_pass=True).observe({"generate": 1.0}, {}) == []


def test_a_resumed_run_that_has_just_refreshed_goes_by_what_it_measured() -> None:
    schedule = usual()
    assert observe(schedule, 0.041, 3, cost=0.4) == [] and not schedule.rare
    assert "costs 0.4 s" in observe(usual(), 0.039, 3, cost=0.4)[0]


def test_a_draft_that_gains_less_learns_seldom_until_it_gains_more() -> None:
    """0.5 s of steps of 10.5 s: every fifth refresh takes 1%."""
    schedule = usual()
    assert observe(schedule, 0.06, 3) == []
    (note,) = observe(schedule, 0.04)
    assert "saves at most 0.4 s a step and learning costs 0.5 s" in note
    assert "it learns every 20 steps from now on, not every 4." in note
    assert due(schedule) == [19, 39, 59]
    assert [step for step in range(64) if schedule.needs_states(step)] == due(schedule)
    assert observe(schedule, 0.04, 20, cost=0.01) == [], "what it costs while it is rare does not count"
    assert "every 4 steps from now on, not every 20" in observe(schedule, 0.06, cost=0.01)[0]
    assert due(schedule) == list(range(3, 64, 4))


def test_what_takes_little_of_the_time_goes_on() -> None:
    """A draft that gives nothing yet may come to give something by learning."""
    schedule = usual()
    assert observe(schedule, 0.0, 20, cost=0.09) == [] and not schedule.rare
    assert observe(schedule, 0.0, 20, cost=0.11) != []


def test_a_pass_that_the_actor_needs_anyway_costs_the_draft_nothing() -> None:
    schedule = usual(needs_pass=False)
    assert observe(schedule, 0.06, 3) == []
    assert observe(schedule, 0.04) == [] and observe(schedule, 0.02) != []


def test_steps_without_a_clock_are_no_error() -> None:
    schedule = usual()
    for _ in range(8):
        schedule.observe({}, {})


@pytest.mark.parametrize(("every", "backs_off", "steps"), [(0, True, []), (16, False, [15, 31, 47, 63])])
def test_it_never_learns_without_a_draft_and_keeps_its_steps_in_deterministic_runs(
    every: int, backs_off: bool, steps: list[int]
) -> None:
    schedule = usual(every, backs_off=backs_off)
    assert observe(schedule, 0.0, 40) == []
    assert due(schedule) == steps and schedule.needs_states(5) == bool(every)
