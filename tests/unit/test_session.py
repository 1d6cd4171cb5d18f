"""Random histories of sessions: samples join, end, pause, survive deaths, are given up; none is lost or doubled."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.ledger.entry import Purpose
from rlhfspec_mega.ledger.ledger import Ledger
from rlhfspec_mega.planning.lengths import LengthPredictor
from rlhfspec_mega.planning.rollout_state import Plan, RolloutState
from rlhfspec_mega.rollout import reallocation
from rlhfspec_mega.rollout.manager import RolloutManager
from rlhfspec_mega.rollout.migration.lines import DriverLines
from rlhfspec_mega.rollout.migration.messages import MigrationOrders
from rlhfspec_mega.rollout.migration.wire import Outbox
from rlhfspec_mega.rollout.protocol import SampleSnapshot
from rlhfspec_mega.rollout.reallocation import Reallocation
from rlhfspec_mega.rollout.session import Session
from rlhfspec_mega.types import GenerationRequest, GenerationResult, Prompt, Sample, SampleState
from tests.engine_pool import Answered, Pool, make_engine, opened, request
from tests.unit.test_migration import RandomMoves

ENGINES = [make_engine() for _ in range(3)]
ALONE: dict[str, list[int]] = {}


def tokens_alone(one: GenerationRequest) -> list[int]:
    """What an engine makes of a sample that it has to itself."""
    if one.sample_id not in ALONE:
        engine = make_engine().engine
        engine.submit([one])
        with torch.inference_mode():
            (result,) = [result for _ in range(20) for result in engine.poll(0.0)]
        ALONE[one.sample_id] = result.tokens
    return ALONE[one.sample_id]


SEND = Outbox.send


def send_and_wait(self: Outbox, message: Any, payload: memoryview | bytes = b"") -> None:
    """Send a message and wait until the engine's thread has received it."""
    port = self._socket.getpeername()[1]
    agents = [worker.migration for worker in ENGINES if worker.migration]
    inboxes = [agent._inbox for agent in agents if agent._inbox.address.port == port]
    before = [inbox._received.qsize() for inbox in inboxes]
    SEND(self, message, payload)
    end = time.monotonic() + 10
    while any(inbox._received.qsize() == count for inbox, count in zip(inboxes, before, strict=True)):
        assert time.monotonic() < end
        time.sleep(0)


class SessionMachine(RuleBasedStateMachine):
    """One session after another over three real engines in this process.

    Hypothesis replays a history, and the machine is never as fast twice. So plans are due by a clock that moves with
    every look at it, and a message has come when its sender goes on.
    """

    def __init__(self) -> None:
        super().__init__()
        ticks = itertools.count()
        clock = SimpleNamespace(monotonic=lambda: next(ticks) * 1e-3, thread_time=lambda: 0.0)
        self.clock = mock.patch.object(reallocation, "time", clock)
        self.clock.start()
        self.delivery = mock.patch.object(Outbox, "send", send_and_wait)
        self.delivery.start()

    def teardown(self) -> None:
        self.clock.stop()
        self.delivery.stop()

    @initialize(moves=st.booleans(), seed=st.integers(0, 99), slots=st.sampled_from([None, 1, 2, 4]))
    def begin(self, moves: bool, seed: int, slots: int | None) -> None:
        for engine in ENGINES:
            engine.clear()
        self.pool = Pool(ENGINES)
        moving = Reallocation(RandomMoves(seed, 0.5), LengthPredictor(limit=16), plan_seconds=0.0) if moves else None
        self.manager = RolloutManager(
            self.pool,
            self.pool.wait,
            revive=self.pool.revive,
            poll_seconds=0.0,
            slots=slots,
            reallocation=moving,
        )
        self.ledger, self.groups = Ledger(), 0
        self.session = None
        self.asked: dict[str, GenerationRequest] = {}
        self.taken: list[GenerationResult] = []

    def fresh(self, count: int) -> list[GenerationRequest]:
        """Samples of new groups, opened in the ledger."""
        requests = [request(self.groups + group, member) for group in range(count) for member in range(2)]
        prompts = {f"{self.groups + group}": Prompt(self.groups + group, "", "", (1,)) for group in range(count)}
        self.ledger.open([Sample(one.sample_id, 0, prompts[one.group_id], 0) for one in requests], Purpose.EVALUATE)
        self.groups += count
        return requests

    @rule(count=st.integers(1, 3))
    def more(self, count: int) -> None:
        requests = self.fresh(count)
        if self.session is None:
            self.session = self.manager.begin(requests, self.ledger, "test")
            self.asked, self.taken = {}, []
        else:
            self.session.start(requests)
            with pytest.raises(RunError, match="twice"):
                self.session.start(requests[:1])
        self.asked |= {one.sample_id: one for one in requests}

    @precondition(lambda self: self.session and self.session.calls())
    @rule(data=st.data())
    def hear(self, data: st.DataObject) -> None:
        calls = self.session.calls()
        self.session.handle_answers(data.draw(st.lists(st.sampled_from(calls), unique=True, min_size=1)))

    @precondition(lambda self: self.session)
    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        self.session.pause(paused)

    @precondition(lambda self: self.session and len(self.pool.serving()) > 1)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """The engine's call, if one is in flight, is never answered."""
        rank = data.draw(st.sampled_from(self.pool.serving()))
        dead = [call for call in self.session.calls() if call.rank == rank]
        self.pool._die(rank)
        for call in dead:
            call.dead = True

    @precondition(lambda self: self.session)
    @rule()
    def take(self) -> None:
        self.taken += self.session.take()

    @precondition(lambda self: self.session)
    @rule()
    def drain(self) -> None:
        self.session.pause(False)
        self.session.advance()
        self.manager.drain(self.session, "test")
        self.taken += self.session.take()
        assert sorted(one.sample_id for one in self.taken) == sorted(self.asked)
        self.session = None

    @precondition(lambda self: self.session)
    @rule()
    def abort(self) -> None:
        left = self.manager.abort(self.session, "test")
        self.taken += self.session.take()
        assert sorted([*left, *(one.sample_id for one in self.taken)]) == sorted(self.asked), "each is accounted for"
        assert {self.ledger.state(name) for name in left} <= {SampleState.PENDING}
        assert all(worker.engine.idle for worker in ENGINES), "engines have forgotten them"
        if left:  # they can be begun anew
            self.asked, self.taken = {name: self.asked[name] for name in left}, []
            self.session = self.manager.begin(list(self.asked.values()), self.ledger, "test")
        else:
            self.session = None

    @invariant()
    def what_ended_is_right_and_counted_once(self) -> None:
        if self.session is None:
            return
        results = self.session.results
        assert {name for name in self.asked if self.ledger.state(name) == SampleState.FINISHED} == set(results)
        assert sorted([*results, *self.session.unfinished()]) == sorted(self.asked)
        taken = [one.sample_id for one in self.taken]
        assert len(set(taken)) == len(taken) and set(taken) <= set(results)
        for name, result in results.items():
            assert result.tokens == tokens_alone(self.asked[name])


TestSession = SessionMachine.TestCase
TestSession.settings = hypothesis_settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_a_session_under_way_is_not_ended() -> None:
    pool = Pool([make_engine()])
    manager = RolloutManager(pool, pool.wait, revive=pool.revive, poll_seconds=0.0)
    one = request(0, 0)
    ledger = Ledger()
    ledger.open([Sample(one.sample_id, 0, Prompt(0, "", "", (1,)), 0)], Purpose.EVALUATE)
    session = manager.begin([one], ledger, "test")
    assert isinstance(session.calls()[0], Answered)
    with pytest.raises(RunError, match="1 of its samples were unfinished"):
        session.end()
    with pytest.raises(RunError, match="while calls to its engines were in flight"):
        session.abandon()


class Onlooker(RandomMoves):
    """Records at each plan whether samples wait in the shared queue."""

    session: Session | None = None

    def __init__(self) -> None:
        super().__init__(1, 0.5)
        self.waiting: list[bool] = []

    def plan(self, state: RolloutState) -> Plan:
        self.waiting.append(self.session is not None and self.session._work.waiting)
        return super().plan(state)


@pytest.mark.parametrize("orders", [None, MigrationOrders()])
@pytest.mark.parametrize("others_wait", [False, True])
def test_a_free_slot_is_reported_at_once_while_samples_wait_for_one(
    orders: MigrationOrders | None, others_wait: bool
) -> None:
    engine, slots = ENGINES[0], ENGINES[0].engine.load().slots
    engine.clear(), engine.join_migration(1.0)
    lengths = [14] * (slots - 1) + [3]
    requests = [
        replace(request(3, member), ignore_stop=True, max_new_tokens=length) for member, length in enumerate(lengths)
    ]
    samples = [SampleSnapshot(one, [], [], []) for one in requests]
    report = engine.advance(samples, 60.0, orders, False, others_wait)
    assert len(report.finished) == (1 if others_wait else slots) and report.unfinished == slots - len(report.finished)


def test_samples_move_only_when_none_waits() -> None:
    pool, policy = Pool([make_engine(), make_engine()]), Onlooker()
    moving = Reallocation(policy, LengthPredictor(limit=16), plan_seconds=0.0)
    manager = RolloutManager(pool, pool.wait, revive=pool.revive, poll_seconds=0.0, slots=2, reallocation=moving)
    requests = [request(group, member) for group in range(6) for member in range(2)]
    policy.session = session = manager.begin(requests, opened(requests), "test")
    assert session._work.waiting and not policy.waiting
    assert right(manager.drain(session, "test"), requests)
    assert policy.waiting and not any(policy.waiting)


class Seen(RandomMoves):
    """Records the tokens of each sample that plans know of."""

    def __init__(self) -> None:
        super().__init__(1, 0.0)
        self.generated: list[list[int]] = []

    def plan(self, state: RolloutState) -> Plan:
        self.generated.append(state.generated.tolist())
        return super().plan(state)


@pytest.mark.parametrize("reached", [True, False])
def test_an_engine_without_samples_lets_the_others_report_before_the_plan(
    monkeypatch: pytest.MonkeyPatch, reached: bool
) -> None:
    """Where the driver cannot reach them, the plan is made of what is known."""
    if not reached:
        monkeypatch.setattr(DriverLines, "open", lambda self, addresses: None)
    pool, policy = Pool([make_engine(), make_engine()]), Seen()
    seldom = Reallocation(policy, LengthPredictor(limit=16), plan_seconds=3600.0)
    manager = RolloutManager(pool, pool.wait, revive=pool.revive, poll_seconds=0.0, reallocation=seldom)
    requests = [replace(request(group, 0), ignore_stop=True, max_new_tokens=14 - 12 * group) for group in range(2)]
    session = manager.begin(requests, opened(requests), "test")
    session.advance()
    policy.generated.clear()  # the first plan is due at once
    seldom._next_urgent = 0.0
    while pool.engines[1].engine.load().running or any(call.rank == 1 for call in session.calls()):
        session.handle_answers([call for call in session.calls() if call.rank == 1])
    assert policy.generated == ([] if reached else [[0]]), "nothing has been heard of the first engine"
    session.handle_answers(session.calls())
    assert policy.generated == ([[1]] if reached else [[0]])
    assert len(manager.drain(session, "test")) == 2


# What an update of the weights beside a session makes of it


def begun(moves: bool, groups: int = 3) -> tuple[Pool, RolloutManager, Session, list[GenerationRequest]]:
    """Two engines with some samples of their own, and as many that the ledger knows of."""
    pool = Pool([make_engine(), make_engine()])
    still = Reallocation(RandomMoves(1, 0.0), LengthPredictor(limit=16), plan_seconds=0.0) if moves else None
    manager = RolloutManager(pool, pool.wait, revive=pool.revive, poll_seconds=0.0, reallocation=still)
    requests = [request(group, member) for group in range(2 * groups) for member in range(2)]
    session = manager.begin(requests[: 2 * groups], opened(requests), "test")
    for _ in range(2):
        session.handle_answers(session.calls()[:1])
    manager.pause_and_wait(session, "test")
    return pool, manager, session, requests


def right(results: dict[str, GenerationResult], requests: Sequence[GenerationRequest]) -> bool:
    found = {name: result.tokens for name, result in results.items()}
    return found == {one.sample_id: tokens_alone(one) for one in requests}


@pytest.mark.parametrize("moves", [False, True])
def test_engines_keep_their_samples_while_weights_come(moves: bool) -> None:
    pool, manager, session, requests = begun(moves)
    steps = [worker.engine.load().decode_steps for worker in pool.engines]
    pool.rejoining = {0, 1}
    session.handle_answers([])  # a replica of the reference has answered, say
    pool.rejoining.clear()
    assert all(worker.engine.load().running for worker in pool.engines)
    assert right(manager.drain(session, "test"), requests[:6])
    prefilled = [worker.engine.stats()["prefill_tokens"] for worker in pool.engines]
    assert all(steps) and sum(prefilled) <= sum(len(one.prompt_tokens) for one in requests[:6])


@pytest.mark.parametrize("moves", [False, True])
def test_an_engine_that_missed_an_update_forgets_what_others_have_now(moves: bool) -> None:
    pool, manager, session, requests = begun(moves)
    pool.rejoining = {1}
    session.pause(False)
    session.handle_answers(session.calls()[:1])
    manager.pause_and_wait(session, "test")
    pool.rejoining.clear()  # the next one reaches it
    session.pause(False)
    session.start(requests[6:])
    assert right(manager.drain(session, "test"), requests)


def test_an_engine_that_was_silent_when_a_rollout_was_given_up_forgets_it() -> None:
    pool, manager, session, requests = begun(moves=False)
    pool.suspect = {1: 3}
    left = manager.abort(session, "test")
    assert pool.engines[1].engine.load().running
    again = [one for one in requests if one.sample_id in left]
    ledger = opened(again)
    assert right(manager.generate(again, ledger, "test"), again)


def test_a_paused_session_is_drained() -> None:
    _, manager, session, requests = begun(moves=False)
    assert right(manager.drain(session, "test"), requests[:6])
