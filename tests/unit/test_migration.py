"""Samples that move between real engines while they decode: the same tokens, each sample once, whatever dies."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfspec_mega.planning.lengths import LengthPredictor
from rlhfspec_mega.planning.rollout_state import Move, Plan, RolloutState
from rlhfspec_mega.rollout.assignment import Assignment
from rlhfspec_mega.rollout.migration import departures
from rlhfspec_mega.rollout.migration.arrivals import Arrivals
from rlhfspec_mega.rollout.migration.messages import MigrationOrder, MigrationOrders
from rlhfspec_mega.rollout.protocol import SampleSnapshot
from rlhfspec_mega.rollout.reallocation import Reallocation
from rlhfspec_mega.rollout.torch_engine.engine import TorchEngine
from rlhfspec_mega.types import EngineReport, GenerationRequest, GenerationResult
from rlhfspec_mega.workers.serving import EngineWorker
from rlhfspec_mega.workers.torch_engine import TorchEngineWorker
from tests.engine_pool import Pool, generate, make_engine, opened, request
from tests.near_tie import assert_same
from tests.random_trees import RandomTrees
from tests.unit import test_losslessness as drafting


class RandomMoves:
    """Implements `RolloutPolicy`: moves samples for no reason at all."""

    def __init__(self, seed: int, share: float) -> None:
        self._draws, self._share = random.Random(seed), share
        self.moves = 0

    def begin(self) -> None:
        pass

    def plan(self, state: RolloutState) -> Plan:
        moves = []
        for sample in range(len(state.ids)):
            others = [index for index in range(len(state.engines)) if index != state.at[sample]]
            if state.movable[sample] and self._draws.random() < self._share:
                moves.append(Move(sample, self._draws.choice(others)))
        self.moves += len(moves)
        return Plan(tuple(moves))


ENGINES = [make_engine() for _ in range(3)]
NUMBERS = itertools.count(1)  # of orders


@pytest.fixture(autouse=True, params=["shared memory", "stream"])
def link(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Engines of one machine, and engines that take each other for ones of another."""
    if request.param == "stream":
        monkeypatch.setattr(departures, "this_machine", lambda: "another")
    for engine in ENGINES:
        engine.leave()
    return str(request.param)


@contextmanager
def troubled(draws: random.Random, slow: float, cancelled: float) -> Iterator[None]:
    """Links that bring messages some steps late, and moves whose time is over before the copy is done.

    Args:
        slow: chance that an engine does not yet see at a step what was sent to it.
        cancelled: of a move's being called off.
    """
    turn, order = Arrivals.on_step_boundary, departures.Departures.order

    def late(self: Arrivals) -> None:
        if draws.random() >= slow:
            turn(self)

    def doomed(self: departures.Departures, one: MigrationOrder) -> None:
        order(self, one)
        if one.sample_id in self._outgoing and draws.random() < cancelled:
            self._outgoing[one.sample_id].deadline = 0.0

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Arrivals, "on_step_boundary", late)
        patched.setattr(departures.Departures, "order", doomed)
        yield


def moving(seed: int, share: float = 0.3) -> Reallocation:
    return Reallocation(RandomMoves(seed, share), LengthPredictor(limit=16), plan_seconds=0.0)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(2, 3),
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.dictionaries(st.integers(3, 80), st.booleans(), max_size=4),
    st.dictionaries(st.integers(3, 80), st.integers(1, 9), max_size=3),
    st.integers(0, 2**16),
    st.sampled_from([0.0, 0.002]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([0.0, 0.3]),
)
def test_every_sample_comes_back_once_with_its_own_tokens(
    engines: int,
    groups: list[int],
    deaths: dict[int, bool],
    silences: dict[int, int],
    seed: int,
    poll: float,
    slow: float,
    cancelled: float,
) -> None:
    """Samples end, engines die or fall silent, links are slow and moves are called off at random moments."""
    requests = [
        replace(request(group, member), ignore_stop=True, max_new_tokens=3 + (5 * group + 3 * member) % 11)
        for group, size in enumerate(groups)
        for member in range(size)
    ]
    for engine in ENGINES:
        engine.clear()  # what a failed example left
    quiet = generate(Pool(ENGINES[:engines]), requests)
    with troubled(random.Random(seed), slow, cancelled):
        pool = Pool(ENGINES[:engines], deaths, silences)
        results = generate(pool, requests, poll=poll, reallocation=moving(seed))
    assert results.keys() == quiet.keys()
    for sample_id, result in results.items():
        assert result.tokens == quiet[sample_id].tokens
    assert all(worker.engine.idle for worker in ENGINES)


class Drafting(EngineWorker):
    """A worker with an engine of the losslessness tests."""

    def __init__(self) -> None:
        shape, policy = drafting.SHAPE, RandomTrees(7)
        engine = drafting.TorchEngine(
            shape,
            slots=24,
            max_positions=140,
            prefill_chunk=64,
            dtype=torch.float32,
            device="cpu",
            draft=drafting.draft_shape(shape),
            policy=policy,
        )
        drafting.send_weights(engine, drafting.WEIGHTS, piece=10**6)
        drafting.send_draft(engine, drafting.draft_weights(drafting.draft_shape(shape)))
        super().__init__(engine, "cpu")

    def pace(self, temperature: float) -> Any:
        return ENGINES[0].pace(temperature)

    def prepare(self) -> None: ...


def test_many_migrations_under_drafting_change_no_token(link: str) -> None:
    """Samples of 60 tokens, each moved several times, to and fro, while others are."""
    count = 200 if link == "shared memory" else 60
    requests = [replace(drafting.request(number), max_new_tokens=60) for number in range(count)]
    requests = [replace(r, sample_id=f"{n}.0", group_id=str(n // 4)) for n, r in enumerate(requests)]
    requests = [replace(r, prompt_tokens=requests[n // 4 * 4].prompt_tokens) for n, r in enumerate(requests)]
    policy = RandomMoves(3, 0.2)
    reallocation = Reallocation(policy, LengthPredictor(limit=60), plan_seconds=0.0)
    found = generate(Pool([Drafting(), Drafting(), Drafting()]), requests, reallocation=reallocation)
    plain = drafting.make_engine(32, None)
    plain.submit(requests)
    assert_same(drafting.finish(plain), found, requests, drafting.make_judge(drafting.SHAPE, drafting.WEIGHTS))
    assert policy.moves > 2 * len(requests)


# Two engines by hand


def begin(count: int, tokens: int = 14) -> tuple[TorchEngineWorker, TorchEngineWorker, list[GenerationRequest]]:
    """Two engines, the first of which decodes some samples of one group."""
    for engine in ENGINES[:2]:
        engine.clear()
    first, second = ENGINES[:2]
    requests = [replace(request(3, member), ignore_stop=True, max_new_tokens=tokens) for member in range(count)]
    first.join_migration(1.0), second.join_migration(1.0)
    first.advance([SampleSnapshot(one, [], [], []) for one in requests], 0.0, MigrationOrders())
    return first, second, requests


def order(destination: TorchEngineWorker, *samples: GenerationRequest) -> MigrationOrders:
    assert destination.migration is not None
    address = destination.migration.address
    return MigrationOrders([MigrationOrder(next(NUMBERS), one.sample_id, address) for one in samples])


def advance(engine: TorchEngineWorker, until: Any, orders: MigrationOrders | None = None) -> list[EngineReport]:
    """Reports until one satisfies a condition."""
    reports, end = [engine.advance([], 0.0, orders or MigrationOrders())], time.monotonic() + 10
    while not until(reports[-1]):
        assert time.monotonic() < end
        reports.append(engine.advance([], 0.0, MigrationOrders()))
    return reports


def arriving(engine: TorchEngineWorker, orders: MigrationOrders) -> EngineReport:
    """The report of sample 3.0's arrival, after few steps: threads receive it."""
    assert engine.migration is not None
    for _ in range(8):
        end = time.monotonic() + 5
        while engine.migration._inbox._received.empty() and time.monotonic() < end:
            time.sleep(0.05)
        report = engine.advance([], 0.0, orders)
        if report.migration.arrived:
            assert [one.sample_id for one in report.migration.arrived] == ["3.0"]
            return report
    raise AssertionError("the sample did not arrive")


def alone(requests: Sequence[GenerationRequest]) -> dict[str, GenerationResult]:
    engine, found = ENGINES[2].engine, dict[str, GenerationResult]()
    engine.clear()
    engine.submit(requests)
    while not engine.idle:
        found |= {result.sample_id: result for result in engine.poll(1.0)}
    return found


def test_the_source_decodes_on_and_a_sample_is_whole_where_it_lands() -> None:
    first, second, requests = begin(2, tokens=20)
    for _ in range(4):  # more positions than can be copied before the next step
        first.advance([], 0.0, MigrationOrders())
    arrived = None
    with pytest.MonkeyPatch.context() as slowly:  # else a busy machine may copy all of it within this step
        slowly.setattr(TorchEngine, "min_copy_bytes", 1)
        slowly.setattr(departures, "COPY_SHARE", 0.0)
        report = first.advance([], 0.0, order(second, requests[0]))
    assert report.unfinished == 2 and [gain.sample_id for gain in report.progress] == ["3.0", "3.1"]
    for _ in range(10):  # fewer steps than the samples have
        first.advance([], 0.0, MigrationOrders())
        time.sleep(0.1)  # threads receive
        arrived = next(iter(second.advance([], 0.0, MigrationOrders()).migration.arrived), None)
        if arrived:
            break
    assert arrived is not None and arrived.sample_id == "3.0"
    assert arrived.tokens == alone(requests)["3.0"].tokens[: len(arrived.tokens)]
    landing = advance(second, lambda report: report.finished or report.migration.landings)
    assert sum(len(report.migration.landings) for report in landing) <= 1
    (left,) = advance(first, lambda report: report.migration.departed)[-1].migration.departed
    assert left == "3.0" and first.engine.load().running == 1


def test_a_sample_that_ends_while_it_is_copied_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchEngine, "min_copy_bytes", 1)  # copying takes longer than the sample lasts
    monkeypatch.setattr(departures, "COPY_SHARE", 0.0)
    first, second, requests = begin(1, tokens=3)
    reports = [first.advance([], 0.0, order(second, requests[0]))]
    reports += advance(first, lambda report: report.migration.kept)
    assert [result.sample_id for report in reports for result in report.finished] == ["3.0"]
    assert second.advance([], 0.0, MigrationOrders()).unfinished == 0


def test_a_destination_that_dies_before_it_acknowledges_gives_the_sample_back() -> None:
    first, second, requests = begin(2)
    first.advance([], 0.0, order(second, *requests))
    while not first.migration.unacknowledged:  # sent, and nobody takes them
        first.advance([], 0.0, MigrationOrders())
    second.clear(), second.leave()
    reports = advance(first, lambda report: report.unfinished == 0)
    results = {result.sample_id: result for report in reports for result in report.finished}
    expected = alone(requests)
    assert {name: result.tokens for name, result in results.items()} == {n: r.tokens for n, r in expected.items()}
    assert sorted(name for report in reports for name in report.migration.kept) == ["3.0", "3.1"]


def test_a_destination_that_dies_in_a_hand_over_keeps_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several are ready to leave for it: the first one's failure concerns them all."""
    first, second, requests = begin(3)
    first.advance([], 0.0, order(second, *requests))
    leaving = first.migration._departures._outgoing
    assert len(leaving) == 3 and all(one.caught_up for one in leaving.values())

    def broken(*_: object) -> None:
        raise ConnectionError("gone")

    monkeypatch.setattr(departures.Outbox, "send", broken)
    reports = advance(first, lambda report: report.unfinished == 0)
    results = {result.sample_id: result.tokens for report in reports for result in report.finished}
    assert results == {name: result.tokens for name, result in alone(requests).items()}
    assert sorted(name for report in reports for name in report.migration.kept) == ["3.0", "3.1", "3.2"]


def test_a_sample_that_comes_while_another_engine_is_cut_off_is_acknowledged() -> None:
    first, second, requests = begin(1)
    third = ENGINES[2]
    third.clear(), third.join_migration(1.0)
    dead = third.migration.address.name
    first.advance([], 0.0, order(second, requests[0]))
    while not first.migration.unacknowledged:
        first.advance([], 0.0, MigrationOrders())
    arriving(second, MigrationOrders(dead_sources=[dead]))
    advance(first, lambda report: report.migration.departed == ["3.0"])


def test_a_sample_that_is_sent_on_before_it_found_a_slot_has_not_landed() -> None:
    first, second, requests = begin(1)
    others = [replace(request(4, member), ignore_stop=True, max_new_tokens=14) for member in range(3)]
    second.advance([SampleSnapshot(one, [], [], []) for one in others], 0.0, MigrationOrders())
    first.advance([], 0.0, order(second, requests[0]))
    advance(first, lambda report: first.migration.unacknowledged > 0)
    reports = [arriving(second, MigrationOrders())]
    assert second.engine.is_waiting("3.0")
    reports += advance(second, lambda report: not second.engine.has_sample("3.0"), order(first, requests[0]))
    assert not [landing for one in reports for landing in one.migration.landings]


def test_a_sample_that_comes_with_its_kv_does_not_wait_for_the_prompts_of_others() -> None:
    first, second = (worker.engine for worker in begin(1)[:2])
    snapshot = first.export_sample("3.0")
    prompt = replace(request(5, 0), prompt_tokens=tuple(range(1, 15)))  # two chunks of 8
    second.submit([prompt])
    second.import_sample(snapshot)
    read = second.stats()["prefill_tokens"]
    second.poll(0.0)
    assert [gain.sample_id for gain in second.progress()] == ["3.0"] and second.stats()["prefill_tokens"] == read
    second.poll(0.0), second.poll(0.0)
    assert second.stats()["prefill_tokens"] > read


@pytest.mark.parametrize(("share", "slower"), [(1.0, 1), (0.0, 2)])  # of the samples that move; the second: none
def test_an_engine_without_samples_brings_the_next_plan_forward(
    monkeypatch: pytest.MonkeyPatch, share: float, slower: int
) -> None:
    first, second, requests = begin(1)
    peers = {0: first.join_migration(1.0), 1: second.join_migration(1.0)}
    now, spent = [0.0], itertools.count(step=0.01)  # a plan takes 10 ms, of which the first counts a tenth
    clock = SimpleNamespace(monotonic=lambda: now[0], thread_time=lambda: next(spent))
    monkeypatch.setattr("rlhfspec_mega.rollout.reallocation.time", clock)
    reallocation = moving(0, share)
    reallocation.begin(requests, peers)
    work = Assignment(requests, 2, [0, 1], opened(requests), deterministic=False)
    work.take(0), work.take(1)
    assert reallocation.due(urgent=False)
    reallocation.plan(work, [0, 1], None)
    dues = []
    for since in (0.004, 0.006, 0.09, 0.11):
        now[0] = since * slower
        dues.append((reallocation.due(urgent=False), reallocation.due(urgent=True)))
    assert dues == [(False, False), (False, True), (False, True), (True, True)]
    for _ in range(5):
        reallocation.plan(work, [0, 1], None)
    dues, planned = [], now[0]  # after five more, which take 4.7 ms in the mean: at most eight times as far apart
    for since in (0.18, 0.19):
        now[0] = planned + since
        dues.append(reallocation.due(urgent=True))
    assert dues == [False, True]


def test_what_a_rollout_that_was_given_up_still_sends_is_left_aside() -> None:
    first, second, requests = begin(1)
    first.advance([], 0.0, order(second, requests[0]))
    while not first.migration.unacknowledged:
        first.advance([], 0.0, MigrationOrders())
    second.join_migration(1.0)  # a new rollout, before the message was looked at
    time.sleep(0.05)
    assert second.advance([], 0.0, MigrationOrders()).unfinished == 0


def test_a_late_order_comes_to_nothing() -> None:
    first, second, requests = begin(1)
    report = first.advance([], 0.0, MigrationOrders([MigrationOrder(0, "unknown", second.migration.address)]))
    assert report.migration.kept == ["unknown"] and report.unfinished == 1
    first.migration._departures._seconds = 0.0
    reports = [first.advance([], 0.0, order(second, requests[0]))]
    reports += advance(first, lambda report: report.finished)
    first.migration._departures._seconds = 30.0
    assert [name for report in reports for name in report.migration.kept] == ["3.0"]


def test_prefilling_again_is_chosen_where_it_is_cheaper() -> None:
    first, second, requests = begin(1)
    orders = order(second, requests[0])
    orders.moves = [orders.moves[0]._replace(prefill_seconds=0.0)]
    first.advance([], 0.0, orders)
    awaited = MigrationOrders(expected=[orders.moves[0].number])
    reports = [second.advance([], 0.02, awaited) for _ in range(100)]
    landings = [landing for report in reports for landing in report.migration.landings]
    assert [(one.settled_bytes, one.delta_bytes) for one in landings] == [(0, 0)]
    tokens = [result.tokens for report in reports for result in report.finished]
    assert tokens == [alone(requests)["3.0"].tokens]
