"""Engines in this process behind the interface of a worker group: real but for the process boundary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlhfspec_mega.config.schema.generation import RolloutConfig
from rlhfspec_mega.ledger.entry import Purpose
from rlhfspec_mega.ledger.ledger import Ledger
from rlhfspec_mega.models.initialize import initial_tensors
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.rollout.manager import RolloutManager
from rlhfspec_mega.rollout.reallocation import Reallocation
from rlhfspec_mega.types import GenerationRequest, GenerationResult, Prompt, Sample
from rlhfspec_mega.workers.torch_engine import TorchEngineWorker

SHAPE = ModelShape("llama", 16, 1, 2, 1, 8, 32, 31, 64, 1e4, 1e-5, True)
TENSORS = mapping_for("llama").hf_tensors(SHAPE)
CONFIG = RolloutConfig(max_running_requests=3, max_prompt_tokens=16, max_new_tokens=16, chunked_prefill_size=8)


class Answered:
    """A finished call, as a cluster's is once waited for."""

    def __init__(self, rank: int, value: Any, dead: bool = False) -> None:
        self.rank, self.dead, self._value = rank, dead, value

    def result(self) -> Any:
        assert not self.dead
        return self._value


class Pool:
    """Real engines called at once; the process boundary is what this leaves out.

    Args:
        deaths: for the calls with these numbers, whether the engine dies before it does the work, or after.
        silences: for the calls with these numbers, for how many waits the engine is suspected afterwards, if it is not
            the last one.
    """

    def __init__(
        self, engines: Sequence[Any], deaths: dict[int, bool] | None = None, silences: dict[int, int] | None = None
    ) -> None:
        self.engines, self.size, self.down = engines, len(engines), set[int]()
        self.deaths, self.calls, self.starts, self.suspect = deaths or {}, 0, 1, dict[int, int]()
        self.silences = silences or {}
        self.rejoining = set[int]()  # they missed a weight update, or one is under way

    def start(self, rank: int, method: str, *args: Any) -> Answered:
        assert rank not in self.down
        number, self.calls = self.calls, self.calls + 1
        dies = number in self.deaths
        if dies and self.deaths[number]:
            return self._die(rank)
        value = getattr(self.engines[rank], method)(*args)
        if number in self.silences and not dies and len(self.serving()) > 1:
            self.suspect[rank] = self.silences[number]
        return self._die(rank) if dies else Answered(rank, value)

    def _die(self, rank: int) -> Answered:
        self.down.add(rank)
        self.engines[rank].clear()
        self.engines[rank].leave()
        return Answered(rank, None, dead=True)

    def serving(self) -> list[int]:
        return [rank for rank in self.alive() if not self.suspect.get(rank)]

    def alive(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.down | self.rejoining]

    def launches(self, rank: int) -> int:
        return self.starts

    def revive(self) -> None:
        assert not self.serving(), "engines are brought back in a rollout only when none is left"
        self.down.clear()
        self.starts += 1

    def wait(self, calls: Sequence[Answered], phase: str, *, first: bool, check: bool) -> Sequence[Answered]:
        self.suspect = {rank: rounds - 1 for rank, rounds in self.suspect.items() if rounds > 1}
        return calls[:1]


def make_engine(**given: Any) -> TorchEngineWorker:
    """`given` are arguments of TorchEngineWorker."""
    worker = TorchEngineWorker(SHAPE, CONFIG, "float32", "cpu", **given)
    worker.engine.begin_update(0, TENSORS)
    worker.engine.update_weights([(name, 0, tensor.flatten()) for name, tensor in initial_tensors(TENSORS, 1, seed=1)])
    worker.end_update(0)
    return worker


def request(group: int, member: int) -> GenerationRequest:
    prompt = (1, 2 + group % 29)  # within the vocabulary
    return GenerationRequest(f"{group}.{member}", f"{group}", prompt, 100 * group + member, 9, stop_tokens=(0,))


def opened(requests: Sequence[GenerationRequest]) -> Ledger:
    """A ledger that expects these samples."""
    ledger, groups = Ledger(), [int(request.group_id) for request in requests]
    prompts = {group: Prompt(group, "", "", (1,)) for group in groups}
    samples = [Sample(request.sample_id, 0, prompts[group], 0) for request, group in zip(requests, groups, strict=True)]
    ledger.open(samples, Purpose.EVALUATE)
    return ledger


def generate(
    pool: Pool,
    requests: Sequence[GenerationRequest],
    deterministic: bool = False,
    progress: Callable[[int, int], None] | None = None,
    poll: float = 0.0,
    reallocation: Reallocation | None = None,
) -> dict[str, GenerationResult]:
    manager = RolloutManager(
        pool, pool.wait, revive=pool.revive, poll_seconds=poll, deterministic=deterministic, reallocation=reallocation
    )
    ledger = opened(requests)
    results = manager.generate(requests, ledger, "generate", progress)
    assert {ledger.state(request.sample_id) for request in requests} <= {"finished"}
    return results
