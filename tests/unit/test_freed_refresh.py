"""The draft's refresh in freed time: when it begins, and that scoring goes first."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfspec_mega.cluster.interface import Call
from rlhfspec_mega.draft.refresh import RefreshReport
from rlhfspec_mega.planning.lengths import LengthPredictor
from rlhfspec_mega.planning.rollout_state import Plan, RolloutState
from rlhfspec_mega.rollout import reallocation
from rlhfspec_mega.rollout.manager import RolloutManager
from rlhfspec_mega.rollout.reallocation import Reallocation
from rlhfspec_mega.workers.draft import FreedRefresh
from tests.engine_pool import Pool, make_engine, opened, request

REPORT = RefreshReport(True, 1.0, 1.1, 5, 2.0, 8)


def answered(value: Any) -> Call:
    return Call("actor", 0, "refresh_draft", 0.0, "log", answer=("ok", value))


class Refreshes:
    """Two actor ranks, the draft on rank 1's device; engine i is on device i."""

    def __init__(self, report: RefreshReport = REPORT, engines: tuple[int, ...] = (0, 1)) -> None:
        self.begun: list[float] = []
        self.waited = 0
        self._report = report
        self.part = FreedRefresh(self._begin, 1, [(device,) for device in engines], 2.0)

    def _begin(self, seconds: float) -> list[Call]:
        self.begun.append(seconds)
        return [answered(None), answered(self._report)]

    def take(self) -> RefreshReport | None:
        def wait(calls: Any, phase: str) -> None:
            self.waited += len(calls)

        return self.part.take(wait)


@pytest.mark.parametrize(
    ("busy", "seconds", "begun"),
    [((0,), 5.0, [2.0]), ((0,), 1.5, [1.5]), ((0,), 0.9, []), ((0, 1), 5.0, []), ((1,), 5.0, []), ((), 3.0, [2.0])],
)
def test_it_begins_on_a_free_device_with_time_enough(busy: tuple[int, ...], seconds: float, begun: list[float]) -> None:
    refreshes = Refreshes()
    refreshes.part.allow()
    refreshes.part.offer(busy, lambda: seconds)
    refreshes.part.offer(busy, lambda: seconds)  # once only
    assert refreshes.begun == begun
    assert refreshes.take() == (REPORT if begun else None)
    assert refreshes.waited == 2 * len(begun)


def test_a_device_of_its_own_is_always_free() -> None:
    refreshes = Refreshes(engines=(2, 3))
    refreshes.part.allow()
    refreshes.part.offer((0, 1), lambda: 9.0)
    assert refreshes.begun == [2.0]


def test_none_that_is_not_wanted_and_none_of_an_earlier_actor() -> None:
    refreshes = Refreshes()
    refreshes.part.offer((), lambda: 9.0)
    assert refreshes.take() is None and refreshes.begun == []
    refreshes.part.allow()
    assert refreshes.take() is None
    refreshes.part.offer((), lambda: 9.0)  # the rollout that it was allowed for is over
    assert refreshes.begun == []
    refreshes.part.allow()
    refreshes.part.offer((), lambda: 9.0)
    refreshes.part.forget()  # the actor was started anew
    assert refreshes.take() is None and refreshes.waited == 0


def test_the_actor_may_be_asked_for_something_else_after_settling() -> None:
    """Engines that come back in the middle of a rollout get their weights from it; the report is not lost."""
    refreshes, waited = Refreshes(), list[str]()
    refreshes.part.settle(lambda calls, phase: waited.append(phase))
    refreshes.part.allow()
    refreshes.part.offer((), lambda: 9.0)
    refreshes.part.settle(lambda calls, phase: waited.append(phase))
    assert waited == ["draft"] and refreshes.take() == REPORT


def test_one_that_had_nothing_to_learn_from_does_not_count() -> None:
    refreshes = Refreshes(RefreshReport(False, None, None, 0, 0.01, 0))
    refreshes.part.allow()
    refreshes.part.offer((), lambda: 9.0)
    assert refreshes.take() is None and refreshes.waited == 2


class Stays:
    """Moves nothing."""

    def begin(self) -> None: ...

    def plan(self, state: RolloutState) -> Plan:
        return Plan()


class Offers:
    """Compares what it is offered with what the engines hold."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.seconds: list[float] = []
        self.idle: list[int] = []

    def offer(self, busy: Collection[int], seconds_left: Callable[[], float]) -> None:
        self.seconds.append(seconds_left())
        for rank in set(range(self._pool.size)) - set(busy):
            assert self._pool.engines[rank].engine.idle
            self.idle.append(rank)


def test_what_the_manager_offers_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven samples on three engines, dealt out three, two, two.

    A microsecond passes whenever it is asked for the time: what is left of the predicted time does not depend on what
    else the machine does.
    """
    ticks = count()
    clock = SimpleNamespace(monotonic=lambda: 1e-6 * next(ticks), thread_time=lambda: 0.0)
    monkeypatch.setattr(reallocation, "time", clock)
    pool = Pool([make_engine() for _ in range(3)])
    offers = Offers(pool)
    manager = RolloutManager(
        pool,
        pool.wait,
        revive=pool.revive,
        poll_seconds=0.0,
        reallocation=Reallocation(Stays(), LengthPredictor(limit=16), plan_seconds=0.0),
        freed_work=offers,
    )
    requests = [request(0, member) for member in range(7)]
    results = manager.generate(requests, opened(requests), "generate")
    assert len(results) == len(requests)
    assert offers.idle and min(offers.seconds) >= 0.0 and max(offers.seconds) > 0.0
