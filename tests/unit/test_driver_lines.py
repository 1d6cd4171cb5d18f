"""What the driver tells engines while they decode; engines that wait for samples wait no longer than needed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfspec_mega.planning.lengths import LengthPredictor
from rlhfspec_mega.rollout.assignment import Assignment
from rlhfspec_mega.rollout.migration import departures, lines
from rlhfspec_mega.rollout.migration.lines import DriverLines
from rlhfspec_mega.rollout.migration.messages import MigrationOrder, MigrationOrders
from rlhfspec_mega.rollout.migration.wire import Address
from rlhfspec_mega.rollout.protocol import SampleSnapshot
from rlhfspec_mega.rollout.reallocation import Reallocation
from rlhfspec_mega.rollout.torch_engine.engine import TorchEngine
from rlhfspec_mega.types import EngineReport, MigrationReport
from rlhfspec_mega.workers.torch_engine import TorchEngineWorker
from tests.engine_pool import Answered, Pool, make_engine, opened, request
from tests.engine_pool import generate as generate_with
from tests.unit.test_migration import RandomMoves, advance, alone, begin, order

ALWAYS = -1  # number of no order: an engine that expects it never stops waiting


@contextmanager
def decoding(engine: TorchEngineWorker, orders: MigrationOrders) -> Iterator[Future[EngineReport]]:
    """A call that lasts as long as the engine has something to decode or to wait for."""
    with ThreadPoolExecutor(1) as calls:
        yield calls.submit(engine.advance, [], 60.0, orders)


def arrived(engine: TorchEngineWorker) -> None:
    """Wait until a message has reached an engine."""
    assert engine.migration is not None
    end = time.monotonic() + 10
    while engine.migration._inbox.empty:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_order_reaches_an_engine_in_a_call() -> None:
    first, second, requests = begin(2)
    assert first.migration and second.migration
    to_engines, (move,) = DriverLines(), order(second, requests[0]).moves
    assert not to_engines.order(first.migration.address, [move]), "there is no connection yet"
    to_engines.open([first.migration.address, second.migration.address])
    assert to_engines.order(first.migration.address, [move])
    arrived(first)
    with decoding(second, MigrationOrders(expected=[move.number])) as call:
        report = first.advance([], 60.0, MigrationOrders())
        landed = call.result(30.0)
    assert report.migration.departed == ["3.0"] and [one.sample_id for one in report.finished] == ["3.1"]
    assert [one.tokens for one in landed.finished] == [alone(requests)["3.0"].tokens]
    assert not second.migration.expecting, "and it has not waited any longer"
    second.leave()
    end = time.monotonic() + 10
    while to_engines.order(move.destination, []):  # the end of the connection is on its way
        assert time.monotonic() < end


def test_an_engine_reports_when_it_is_asked() -> None:
    first = begin(1)[0]
    assert first.migration
    to_engines = DriverLines()
    to_engines.open([first.migration.address])
    with decoding(first, MigrationOrders(expected=[ALWAYS])) as call:
        assert to_engines.ask(first.migration.address)
        call.result(30.0)
    assert not first.migration.asked, "once"


def test_an_order_of_an_earlier_rollout_is_left_aside() -> None:
    first, second, requests = begin(1)
    assert first.migration
    to_engines, old = DriverLines(), first.migration.address
    to_engines.open([old])
    first.join_migration(1.0)
    first.advance([SampleSnapshot(requests[0], [], [], [])], 0.0, MigrationOrders())
    assert to_engines.order(old, order(second, requests[0]).moves)
    arrived(first)
    report = first.advance([], 60.0, MigrationOrders())
    assert [one.sample_id for one in report.finished] == ["3.0"] and not report.migration.kept


@pytest.mark.parametrize("known", [True, False])
def test_an_engine_does_not_wait_for_a_sample_that_stays(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """It has ended before it was copied, or before the order came."""
    monkeypatch.setattr(TorchEngine, "min_copy_bytes", 1)
    monkeypatch.setattr(departures, "COPY_SHARE", 0.0)
    first, second, requests = begin(1, tokens=3)
    orders = order(second, requests[0])
    if not known:
        advance(first, lambda report: report.finished)
    number = orders.moves[0].number
    with decoding(second, MigrationOrders(expected=[number])) as call:
        assert advance(first, lambda report: report.migration.kept, orders)
        report = call.result(30.0)
    assert report.unfinished == 0 and report.migration.called_off == [number]
    assert not second.advance([], 0.0, MigrationOrders()).migration.called_off, "once"


@pytest.mark.parametrize("dies", ["", "afterwards", "before"])
def test_an_engine_is_not_called_again_for_a_sample_that_does_not_come(dies: str) -> None:
    """Although its source has not reported that yet; but it reads the last messages of one that is dead."""
    requests = [request(0, 0)]
    work = Assignment(requests, 2, [0, 1], opened(requests), deterministic=False)
    work.take(0)
    number = work.custody.order("0.0", 0, 1)
    assert work.has_work(1) and work.custody.expected(1) == [number]
    if dies == "before":
        work.lose(0, [1])
    work.report(1, EngineReport([], [], 0, migration=MigrationReport(called_off=[number])), [0, 1])
    assert work.has_work(1) == (dies == "before")
    assert work.custody.moves("0.0"), "it may still be on its way for all that is known"
    if dies == "before":
        assert work.custody.open_sources(1) == [0]
        work.sources_drained(1, [0], [1])
    elif dies:
        work.lose(0, [1])
    else:
        work.report(0, EngineReport([], [], 1, migration=MigrationReport(kept=["0.0"])), [0, 1])
    assert not work.custody.moves("0.0")
    assert [one.request.sample_id for one in work.take(1)] == ["0.0"] * bool(dies)


class Listening(Pool):
    """Notes the orders that go with calls."""

    def __init__(self, engines: Any) -> None:
        super().__init__(engines)
        self.ordered: list[int] = []

    def start(self, rank: int, method: str, *args: Any) -> Answered:
        if method == "advance" and args[2]:
            self.ordered += [move.number for move in args[2].moves]
        return super().start(rank, method, *args)


@pytest.mark.parametrize("reached", [True, False])
def test_each_order_goes_out_once(monkeypatch: pytest.MonkeyPatch, reached: bool) -> None:
    """To engines with a call in flight at once, else with the next call."""
    pool, sent, send = Listening([make_engine(), make_engine()]), list[int](), DriverLines.order

    def noted(self: DriverLines, address: Address, orders: list[MigrationOrder]) -> bool:
        gone = reached and send(self, address, orders)
        sent.extend(move.number for move in orders if gone)
        return gone

    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(ticks) * 1e-3, thread_time=lambda: 0.0)
    monkeypatch.setattr("rlhfspec_mega.rollout.reallocation.time", clock)  # plans are always due
    monkeypatch.setattr(DriverLines, "order", noted)
    requests = [replace(request(group, 0), ignore_stop=True) for group in range(6)]
    policy = RandomMoves(5, 0.5)
    moving = Reallocation(policy, LengthPredictor(limit=16), plan_seconds=0.0)
    assert len(generate_with(pool, requests, reallocation=moving)) == 6
    assert bool(sent) == reached and (reached or pool.ordered)
    together = sorted(sent + pool.ordered)
    assert together == sorted(set(together)) and len(together) <= policy.moves


def test_an_engine_that_cannot_be_reached_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[str]()

    def refused(address: Address, *_: object) -> None:
        tried.append(address.name)
        raise TimeoutError if address.host == "wall" else ConnectionRefusedError

    monkeypatch.setattr(lines, "Outbox", refused)
    to_engines = DriverLines()
    one = Address("10.0.0.1", 1, b"", "one", "")
    walled = [one._replace(host="wall", name=name) for name in ("two", "three")]
    for _ in range(2):
        to_engines.open([one])
        to_engines.open(walled)
    assert tried[0] == "one" and len(tried) == 2, "of those on a machine that does not answer only one"
    assert not any(to_engines.ask(address) for address in (one, *walled))
    to_engines.open([*walled, one._replace(name="four")])
    assert tried[2:] == ["four"]
