"""The rollout manager over real engines in this process: every sample exactly once, whatever dies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.models.hf_directory import write_directory
from rlhfspec_mega.models.initialize import initial_tensors
from rlhfspec_mega.planning.lengths import LengthPredictor
from rlhfspec_mega.planning.tail import TailPolicy
from rlhfspec_mega.rollout.assignment import assign
from rlhfspec_mega.rollout.manager import RolloutManager
from rlhfspec_mega.rollout.reallocation import Reallocation
from rlhfspec_mega.rollout.scoring import Scoring, ScoringTask
from rlhfspec_mega.types import EngineReport, FinishReason, GenerationResult
from tests.engine_pool import SHAPE, TENSORS, Answered, Pool, generate, make_engine, opened, request
from tests.replicas import TransformerReplicas

ENGINES = [make_engine() for _ in range(3)]


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 3), st.lists(st.integers(1, 5), max_size=7), st.sampled_from([0.0, 0.01]))
def test_every_sample_comes_back_once_with_its_own_tokens(engines: int, groups: list[int], poll: float) -> None:
    requests = [request(group, member) for group, size in enumerate(groups) for member in range(size)]
    seen: list[tuple[int, int]] = []
    results = generate(Pool(ENGINES[:engines]), requests, progress=lambda *now: seen.append(now), poll=poll)
    assert results.keys() == {request.sample_id for request in requests}
    for one in requests[::4]:
        assert results[one.sample_id].tokens == generate(Pool(ENGINES[2:]), [one])[one.sample_id].tokens
    if requests:
        assert seen[-1] == (len(requests), len(requests))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.dictionaries(st.integers(0, 40), st.booleans(), max_size=6),
    st.booleans(),
)
def test_deaths_change_neither_the_samples_nor_the_count(
    engines: int, groups: list[int], deaths: dict[int, bool], deterministic: bool
) -> None:
    """Each sample once, with the tokens of a quiet rollout; when deterministic, the same bits."""
    requests = [request(group, member) for group, size in enumerate(groups) for member in range(size)]
    quiet = generate(Pool(ENGINES[:engines]), requests, deterministic)
    pool = Pool(ENGINES[:engines], deaths)
    results = generate(pool, requests, deterministic)
    assert results.keys() == quiet.keys()
    for sample_id, result in results.items():
        expected = quiet[sample_id]
        assert result.tokens == expected.tokens and result.versions == expected.versions
        if deterministic:
            assert result.logprobs == expected.logprobs
        else:
            assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert all(worker.engine.idle for worker in ENGINES)


def test_a_dead_engines_samples_go_on_from_their_last_tokens() -> None:
    """The survivor prefills what was known of them and decodes only the rest."""
    requests = [replace(request(group, 0), ignore_stop=True) for group in range(2)]
    full = sum(len(result.tokens) for result in generate(Pool(ENGINES[:2]), requests).values())
    before = ENGINES[0].engine.stats()["generated_tokens"]
    pool = Pool(ENGINES[:2], {9: True})  # one token a call and engine: engine 1's fifth call
    generate(pool, requests)
    assert pool.down == {1}
    of_engine_0 = ENGINES[0].engine.stats()["generated_tokens"] - before
    assert of_engine_0 == full - 4, "engine 1 had decoded and reported four tokens"


def test_an_engine_that_is_away_from_the_start_gets_nothing() -> None:
    pool = Pool(ENGINES[:2])
    pool.down.add(1)
    requests = [request(group, 0) for group in range(3)]
    for deterministic in (False, True):
        assert generate(pool, requests, deterministic).keys() == {"0.0", "1.0", "2.0"}


def test_a_suspect_engine_keeps_its_samples_until_it_is_heard_again() -> None:
    pool = Pool(ENGINES[:2])
    requests = [replace(request(group, 0), ignore_stop=True) for group in range(2)]

    def suspected(done: int, total: int) -> None:
        if pool.calls == 4:
            pool.suspect = {1: 30}  # falls silent between two calls, and the other finishes meanwhile

    results = generate(pool, requests, progress=suspected)
    assert results == generate(Pool(ENGINES[:2]), requests)
    assert pool.starts == 1, "nobody was revived"


def test_an_engine_that_was_replaced_unnoticed_has_lost_what_it_held() -> None:
    pool = Pool(ENGINES[:2])
    requests = [replace(request(group, 0), ignore_stop=True) for group in range(2)]

    def replaced(done: int, total: int) -> None:
        if pool.calls == 4 and pool.starts == 1:
            for engine in ENGINES[:2]:
                engine.clear()
            pool.starts += 1

    results = generate(pool, requests, progress=replaced)
    expected = generate(Pool(ENGINES[:2]), requests)
    assert {i: result.tokens for i, result in results.items()} == {i: result.tokens for i, result in expected.items()}


@given(st.lists(st.integers(1, 9), max_size=20), st.integers(1, 8))
def test_assignment_keeps_groups_together_and_balances(groups: list[int], engines: int) -> None:
    requests = [request(group, member) for group, size in enumerate(groups) for member in range(size)]
    shares = assign(requests, engines)
    assert sorted(r.sample_id for share in shares for r in share) == sorted(r.sample_id for r in requests)
    homes = {r.group_id: {i for i, share in enumerate(shares) if r in share} for r in requests}
    assert all(len(home) == 1 for home in homes.values())
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= max(groups, default=0)


class Misbehaving:
    """An engine at the process boundary that returns given ids and claims to hold so many others."""

    def __init__(self, ids: list[str], unfinished: int) -> None:
        self._ids, self._unfinished = ids, unfinished

    def advance(self, *arguments: Any) -> EngineReport:
        finished = [GenerationResult(i, [1], [0.0], [0], FinishReason.STOP) for i in self._ids]
        return EngineReport(finished, [], self._unfinished)


@pytest.mark.parametrize(
    ("ids", "unfinished", "words"),
    [
        (["0.0", "0.0"], 0, r"0\.0 came back twice from engine 0"),
        (["9.9"], 2, "was never given to engine 0"),
        (["0.0"], 0, r"holds 0 samples and was given 1.*among them 0\.1: it has lost"),
    ],
)
def test_a_doubled_foreign_or_lost_sample_stops_the_run(ids: list[str], unfinished: int, words: str) -> None:
    with pytest.raises(RunError, match=words):
        generate(Pool([Misbehaving(ids, unfinished)]), [request(0, 0), request(0, 1)])


def test_tokens_are_those_of_the_engine_alone() -> None:
    """The manager adds nothing: the same request straight into an engine."""
    one = request(3, 1)
    direct = ENGINES[1].engine
    direct.submit([one])
    with torch.inference_mode():
        results = [result for _ in range(20) for result in direct.poll(0.0)]
    assert results == [generate(Pool(ENGINES[:1]), [one])[one.sample_id]]


class LateReplica(TransformerReplicas):
    """A replica whose answers are heard of last; it dies in its first batch, if asked for."""

    def __init__(self, directory: Path, dies: bool) -> None:
        super().__init__(directory, engines={0: {0}, 1: {1}})
        self.dies = dies

    def start(self, replica: int, tasks: Sequence[ScoringTask], models: Sequence[str]) -> list[Answered]:
        if self.dies:
            self.dies = False
            return [Answered(replica, None, dead=True)]
        return super().start(replica, tasks, models)


class HeardLast(Pool):
    """Engines that are heard of before replicas; decoding and scoring of one device at a time is checked."""

    def wait(self, calls: Sequence[Answered], phase: str, *, first: bool, check: bool) -> Sequence[Answered]:
        return calls[:1] if first else calls


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("beside_actor", [False, True])
def test_a_rollout_does_not_wait_for_what_is_being_scored(
    tmp_path: Path, beside_actor: bool, dies: bool, moves: bool
) -> None:
    directory = tmp_path / "reference"
    write_directory(directory, SHAPE, initial_tensors(TENSORS, SHAPE.num_layers, seed=2))
    pool, replicas = HeardLast([make_engine(), make_engine()]), LateReplica(directory, dies)
    # One sample is long: the other engine is soon without any.
    requests = [
        replace(request(0, 0), max_new_tokens=14, ignore_stop=True),
        *(replace(request(1, i), max_new_tokens=2) for i in range(4)),
    ]
    still = Reallocation(TailPolicy(None), LengthPredictor(limit=16), plan_seconds=0.0)
    manager = RolloutManager(
        pool, pool.wait, revive=pool.revive, poll_seconds=0.0, reallocation=still if moves else None
    )
    ledger = opened(requests)
    scoring = Scoring(replicas, max_tokens=64, ledger=ledger)
    results = manager.generate(requests, ledger, "generate", scoring=scoring)
    assert len(results) == len(requests)
    assert not scoring.done and scoring.calls(), "the rollout is over, a replica still scores"
    if beside_actor:  # what the cluster does with it while the driver waits for something else
        left = manager.scoring_left(scoring)
        while calls := left.calls():
            left.handle_answers(calls[:1])
        assert scoring.done
    manager.finish_scoring(scoring, "reference")
    assert scoring.done and scoring.results.keys() == results.keys()
    assert (manager.take_tail().fused_tasks > 0) != dies
