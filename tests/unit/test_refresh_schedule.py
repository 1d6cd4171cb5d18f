"""When the draft learns: in every due step while that gains time, seldom while it costs more."""

from __future__ import annotations

import pytest

from rlhfspec_mega.planning.refresh_schedule import BLOCK, SELDOM, RefreshSchedule


def observe(schedule: RefreshSchedule, share: float, steps: int = BLOCK, cost: float = 0.5) -> list[str]:
    """Steps of ten seconds of generation, in which the draft model gave this share of the tokens."""
    notes = []
    for _ in range(steps):
        tokens = {"sample_steps": 400.0, "accepted": 600.0, "recalled": 600.0 - 1000.0 * share}
        metrics = {f"speculation/{name}": value for name, value in tokens.items()}
        notes += schedule.observe({"generate": 10.0, "draft": cost / 2, "logprobs": cost / 2}, metrics)
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
    """The first comparison comes before the first refresh, with the time that a refresh is allowed."""
    schedule = usual()
    assert observe(schedule, 0.049, 2) == []
    (note,) = observe(schedule, 0.049, 1)
    assert "saves at most 0.49 s a step and learning costs 0.5 s" in note
    assert due(schedule) == [31, 63] and not schedule.needs_states(3)
    schedule = usual()
    assert observe(schedule, 0.051, 3) == [] and due(schedule)[0] == 3
    assert RefreshSchedule(1, 2.0, backs_off=True, needs_pass=True).observe({"generate": 1.0}, {}) == []


def test_a_draft_that_gains_less_learns_seldom_until_it_gains_more() -> None:
    schedule = usual()
    assert observe(schedule, 0.06, 3) == []
    (note,) = observe(schedule, 0.04)
    assert "saves at most 0.4 s a step and learning costs 0.5 s" in note
    assert "it learns every 32 steps from now on, not every 4." in note
    assert due(schedule) == [4 * SELDOM - 1, 8 * SELDOM - 1]
    assert [step for step in range(64) if schedule.needs_states(step)] == due(schedule)
    assert observe(schedule, 0.04, 20, cost=0.01) == [], "what it costs while it is rare does not count"
    assert "every 4 steps from now on, not every 32" in observe(schedule, 0.06, cost=0.01)[0]
    assert due(schedule) == list(range(3, 64, 4))


def test_rare_refreshes_take_little_of_the_time() -> None:
    """Steps of a second, of which learning would take a half every fourth step: every two hundredth, it takes 1%."""
    schedule = usual()
    for _ in range(3):
        schedule.observe({"generate": 0.5, "update": 0.5}, {})
    assert due(schedule, 1000) == [199, 399, 599, 799, 999]


def test_a_pass_that_the_actor_needs_anyway_costs_the_draft_nothing() -> None:
    schedule = usual(needs_pass=False)
    assert observe(schedule, 0.06, 3) == []
    assert observe(schedule, 0.04) == [] and observe(schedule, 0.02) != []


@pytest.mark.parametrize(("every", "backs_off", "steps"), [(0, True, []), (16, False, [15, 31, 47, 63])])
def test_it_never_learns_without_a_draft_and_keeps_its_steps_in_deterministic_runs(
    every: int, backs_off: bool, steps: list[int]
) -> None:
    schedule = usual(every, backs_off=backs_off)
    assert observe(schedule, 0.0, 40) == []
    assert due(schedule) == steps and schedule.needs_states(5) == bool(every)
