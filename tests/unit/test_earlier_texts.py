"""What all engines draft from: every engine has the same texts, whenever it joined, and a run that goes on has them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfspec_mega.config.schema.generation import SpeculationConfig
from rlhfspec_mega.history.sizes import CHUNK, PROMPT_END
from rlhfspec_mega.rollout.earlier_texts import EarlierTexts
from rlhfspec_mega.rollout.manager import RolloutManager
from rlhfspec_mega.types import FinishedText, GenerationResult
from rlhfspec_mega.workers.torch_engine import TorchEngineWorker
from tests.engine_pool import Answered, Pool, make_engine, opened, request

HISTORY = SpeculationConfig(policy="adaptive", sources=["history"])


class Recorder:
    """Engines that only note what they are told to remember.

    Attributes:
        dying: ranks that die when they are asked.
        first: launch number of each rank.
    """

    def __init__(self, size: int) -> None:
        self.size, self.first, self.dying, self.down = size, [1] * size, set[int](), set[int]()
        self.sent: list[tuple[int, list[str], bool]] = []

    def start(self, rank: int, method: str, *args: Any) -> Answered:
        assert method == "remember"
        self.sent.append((rank, [text.sample_id for text in args[0]], args[1]))
        if rank in self.dying:
            self.down.add(rank)
        return Answered(rank, None, dead=rank in self.dying)

    def serving(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.down]

    alive = serving

    def launches(self, rank: int) -> int:
        return self.first[rank]

    def wait(self, calls: Sequence[Answered], phase: str, *, first: bool, check: bool) -> Sequence[Answered]:
        return calls

    def taken(self) -> list[tuple[int, list[str], bool]]:
        taken, self.sent = self.sent, []
        return taken


def made(*names: str, size: int = 4) -> list[FinishedText]:
    return [FinishedText(name, tuple(range(1, 30)), [3] * size) for name in names]


@pytest.mark.parametrize("deterministic", [False, True])
def test_engines_get_what_they_lack(deterministic: bool) -> None:
    pool = Recorder(2)
    texts = EarlierTexts(pool, pool.wait, 1000, deterministic)
    texts.complete("reshard")
    assert pool.taken() == [(0, [], True), (1, [], True)]
    texts.add(made("a", "b"), "generate")
    assert pool.taken() == [(0, ["a", "b"], False), (1, ["a", "b"], False)]
    texts.complete("reshard")
    assert pool.taken() == []
    pool.first[1] = 2  # another process
    texts.complete("reshard")
    assert pool.taken() == [(1, ["a", "b"], True)]
    pool.dying = {0}
    texts.add(made("c"), "generate")
    assert pool.taken() == [(0, ["c"], False), (1, ["c"], False)]
    pool.dying, pool.down, pool.first[0] = set(), set(), 2
    texts.complete("reshard")
    assert pool.taken() == [(0, ["a", "b", "c"], True)]
    saved = json.loads(json.dumps(texts.state_dict()))
    resumed = EarlierTexts(pool, pool.wait, 1000, deterministic)
    resumed.load_state_dict(saved)
    resumed.complete("reshard")
    smaller, off = (EarlierTexts(pool, pool.wait, tokens, deterministic) for tokens in (128, 0))
    for other, kept in ((smaller, ["b", "c"]), (off, [])):
        other.load_state_dict(saved)
        assert [text.sample_id for text in other.state_dict()] == kept
    assert pool.taken() == [(0, ["a", "b", "c"], True), (1, ["a", "b", "c"], True)]
    assert json.loads(json.dumps(resumed.state_dict())) == saved and len(saved[0][1]) == PROMPT_END


def test_one_engine_has_its_own_samples_already_unless_all_begin_alike() -> None:
    for deterministic in (False, True):
        pool = Recorder(1)
        texts = EarlierTexts(pool, pool.wait, 1000, deterministic)
        texts.complete("reshard")
        texts.add(made("a"), "generate")
        assert pool.taken() == [(0, [], True), (0, ["a"], False)][: 1 + deterministic]


@pytest.mark.parametrize(("history_tokens", "kept"), [(0, 0), (63, 0), (64, 1), (191, 2), (1000, 4)])
def test_of_a_large_step_the_newest_texts_are_kept(history_tokens: int, kept: int) -> None:
    """Half of an engine's history is for them; each of these takes a chunk of 32 tokens."""
    pool = Recorder(2)
    texts = EarlierTexts(pool, pool.wait, history_tokens, False)
    texts.complete("reshard")
    pool.taken()
    texts.add(made("a", "b", "c", "d"), "generate")
    assert [text[0] for text in texts.state_dict()] == ["a", "b", "c", "d"][4 - kept :]
    assert pool.taken() == [(rank, ["a", "b", "c", "d"][4 - kept :], False) for rank in range(2) if history_tokens]


def worker(**more: Any) -> TorchEngineWorker:
    return make_engine(deterministic=True, drafting=HISTORY, history_tokens=1024, **more)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 200), max_size=6), min_size=1, max_size=8), st.integers(0, 7))
def test_an_engine_that_joins_late_has_what_the_others_have_bit_for_bit(steps: list[list[int]], joins: int) -> None:
    pool = Pool([worker(), worker()])
    pool.launches = lambda rank: launches[rank]  # type: ignore[method-assign]
    launches = [1, 1]
    texts = EarlierTexts(pool, pool.wait, 1024, deterministic=True)
    texts.complete("reshard")
    for step, sizes in enumerate(steps):
        new = [FinishedText(f"{step}.{i}", [i, 1], [(step + k) % 30 for k in range(n)]) for i, n in enumerate(sizes)]
        texts.add(new, "generate")
        if step == joins:
            pool.engines, launches[1] = [pool.engines[0], worker()], 2
        texts.complete("reshard")
    first, second = (one._shared_texts._store for one in pool.engines)
    assert first.clock[0] == second.clock[0] and (first.heads == second.heads).all()
    assert (first.chunks == second.chunks).all()
    filled = (np.arange(CHUNK) < first.chunks[:, 1:2]).flatten()  # nothing else is ever read
    assert (first.tokens[filled] == second.tokens[filled]).all()
    assert (first.chains[:, filled] == second.chains[:, filled]).all()


class Launched(Pool):
    """Engines whose place is taken by new ones when they have died."""

    def __init__(self, texts: dict[str, EarlierTexts], **given: Any) -> None:
        super().__init__([worker(), worker()], **given)
        self._texts, self._numbers = texts, [1, 1]

    def launches(self, rank: int) -> int:
        return self._numbers[rank]

    def replace_dead(self) -> None:
        for rank in self.down:
            self.engines[rank], self._numbers[rank] = worker(), self._numbers[rank] + 1
        self.down.clear()

    def revive(self) -> None:
        self.replace_dead()
        self._texts["now"].complete("revive")


def rollouts(
    deaths: dict[int, dict[int, bool]], silences: dict[int, dict[int, int]], resumed: int
) -> tuple[list[dict[str, GenerationResult]], list[tuple[int, int]]]:
    """Steps of the same prompts, and each step's draft tokens (verified, accepted).

    Args:
        deaths, silences: of each step's rollout, as Pool has them.
        resumed: step before which all engines and the driver are started anew, from what the driver has saved.
    """
    texts: dict[str, EarlierTexts] = {}
    pool, found, drafted = Launched(texts), list[dict[str, GenerationResult]](), list[tuple[int, int]]()
    texts["now"] = EarlierTexts(pool, pool.wait, 1024, deterministic=True)
    for step in range(4):
        if step == resumed:
            saved = json.loads(json.dumps(texts["now"].state_dict()))
            pool = Launched(texts)
            texts["now"] = EarlierTexts(pool, pool.wait, 1024, deterministic=True)
            texts["now"].load_state_dict(saved)
        texts["now"].complete("reshard")
        pool.deaths, pool.silences, pool.calls = deaths.get(step, {}), silences.get(step, {}), 0
        manager = RolloutManager(pool, pool.wait, revive=pool.revive, poll_seconds=0.0, deterministic=True)
        requests = [replace(request(group, member), temperature=0.0) for group in range(4) for member in range(2)]
        requests += [request(group, 2) for group in range(4)]
        found.append(manager.generate(requests, opened(requests), f"step {step}"))
        pool.deaths, pool.silences = {}, {}
        pool.replace_dead()
        ended = [FinishedText(one.sample_id, one.prompt_tokens, found[-1][one.sample_id].tokens) for one in requests]
        texts["now"].add(ended, f"step {step}")
        tallies = [engine.take_tally() for engine in pool.engines]
        drafted.append((sum(tally.verified for tally in tallies), sum(tally.accepted for tally in tallies)))
    return found, drafted


@pytest.mark.parametrize(
    ("deaths", "silences", "resumed"),
    [
        ({0: {3: True}}, {}, -1),
        ({1: {2: False}}, {}, -1),
        ({0: {0: True}, 2: {4: True}}, {}, -1),
        ({1: {2: True, 5: True}}, {}, -1),
        ({}, {0: {1: 3}, 1: {2: 5}}, -1),
        ({}, {}, 2),
        ({1: {2: True}}, {2: {1: 4}}, 1),
    ],
    ids=["dies", "dies with its answer", "two die", "all die", "are silent", "resumed", "dies, silent, resumed"],
)
def test_shares_are_drafted_for_alike_whatever_happens(
    deaths: dict[int, dict[int, bool]], silences: dict[int, dict[int, int]], resumed: int
) -> None:
    """The same bits of every log-prob: the steps had the same draft tokens. Those of a dead engine are not counted."""
    quiet, wanted = rollouts({}, {}, -1)
    assert wanted[3][1] > 20, "hardly anything was drafted: the comparison shows nothing"
    disturbed, drafted = rollouts(deaths, silences, resumed)
    assert [{name: (one.tokens, one.logprobs) for name, one in step.items()} for step in disturbed] == [
        {name: (one.tokens, one.logprobs) for name, one in step.items()} for step in quiet
    ]
    assert [(step, both) for step, both in enumerate(drafted) if step not in deaths] == [
        (step, both) for step, both in enumerate(wanted) if step not in deaths
    ]


def test_texts_that_are_sent_anew_replace_all_others() -> None:
    engine = make_engine(drafting=HISTORY, history_tokens=1024)
    engine.remember(made("a", "b"), anew=False)
    store = engine.engine.history._store
    assert store.clock[0] == 2
    engine.remember(made("c"), anew=True)
    assert store.clock[0] == 1 and (store.chunks[1:, 0] < 0).all()
