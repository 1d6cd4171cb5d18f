"""The rollout manager over real engines in this process: every sample exactly once, whatever the sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.models.initialize import initial_tensors
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.rollout.manager import RolloutManager, assign
from rlhfspec_mega.rollout.torch_engine.engine import TorchEngine
from rlhfspec_mega.types import EngineLoad, FinishReason, GenerationRequest, GenerationResult

SHAPE = ModelShape("llama", 16, 1, 2, 1, 8, 32, 31, 64, 1e4, 1e-5, True)
TENSORS = mapping_for("llama").hf_tensors(SHAPE)


class Answered:
    """A finished call, as a cluster's is once waited for."""

    def __init__(self, rank: int, value: Any) -> None:
        self.rank, self._value = rank, value

    def result(self) -> Any:
        return self._value


class InProcessEngines:
    """Real engines called at once: the process boundary is what this leaves out."""

    def __init__(self, engines: Sequence[Any]) -> None:
        self.engines, self.size = engines, len(engines)

    def start(self, rank: int, method: str, *args: Any) -> Answered:
        return Answered(rank, getattr(self.engines[rank], method)(*args))


def wait(calls: Sequence[Answered], phase: str, *, first: bool = False) -> Sequence[Answered]:
    return calls[:1] if first else calls


def make_engine() -> TorchEngine:
    engine = TorchEngine(SHAPE, slots=3, max_positions=32, prefill_chunk=8, dtype=torch.float32, device="cpu")
    engine.begin_update(0, TENSORS)
    engine.update_weights([(name, 0, tensor.flatten()) for name, tensor in initial_tensors(TENSORS, 1, seed=1)])
    engine.end_update(0)
    return engine


def request(group: int, member: int) -> GenerationRequest:
    return GenerationRequest(f"{group}.{member}", f"{group}", (1, 2 + group), 100 * group + member, 6, stop_tokens=(0,))


ENGINES = [make_engine() for _ in range(3)]


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 3), st.lists(st.integers(1, 5), max_size=7), st.sampled_from([0.0, 0.01]))
def test_every_sample_comes_back_once_with_its_own_tokens(engines: int, groups: list[int], poll: float) -> None:
    requests = [request(group, member) for group, size in enumerate(groups) for member in range(size)]
    seen: list[tuple[int, int]] = []
    manager = RolloutManager(InProcessEngines(ENGINES[:engines]), wait, poll_seconds=poll)
    results = manager.generate(requests, "generate", lambda done, total: seen.append((done, total)))
    assert results.keys() == {request.sample_id for request in requests}
    alone = RolloutManager(InProcessEngines(ENGINES[2:]), wait, poll_seconds=poll)
    for one in requests[::4]:
        assert results[one.sample_id].tokens == alone.generate([one], "generate")[one.sample_id].tokens
    if requests:
        assert seen[-1] == (len(requests), len(requests))


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
    """An engine at the process boundary that returns given ids and then has nothing left to do."""

    def __init__(self, ids: list[str]) -> None:
        self._ids = ids

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        pass

    def poll(self, seconds: float) -> list[GenerationResult]:
        ids, self._ids = self._ids, []
        return [GenerationResult(i, [1], [0.0], [0], FinishReason.STOP) for i in ids]

    def load(self) -> EngineLoad:
        return EngineLoad(0, 0, 0, 3, 0, 0, 0)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (["0.0", "0.0"], "twice"),
        (["9.9"], "did not ask for"),
        (["0.0"], "engine 0 lost samples: 0.1"),
    ],
)
def test_a_doubled_foreign_or_lost_sample_stops_the_run(ids: list[str], words: str) -> None:
    manager = RolloutManager(InProcessEngines([Misbehaving(ids)]), wait, poll_seconds=0.0)
    with pytest.raises(RunError, match=words):
        manager.generate([request(0, 0), request(0, 1)], "generate")
