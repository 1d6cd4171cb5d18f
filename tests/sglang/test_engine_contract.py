"""Real SGLang behind the RolloutEngine protocol: the contract of engines, stops, full batches, KV."""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sglang_engines import settings, started
from rlhfspec_mega.rollout.protocol import RolloutEngine
from rlhfspec_mega.rollout.sglang_engine import launch
from rlhfspec_mega.rollout.sglang_engine.engine import SGLangEngine
from rlhfspec_mega.rollout.sglang_engine.kv import KvAccess
from rlhfspec_mega.types import GenerationRequest
from rlhfspec_mega.workers.sglang import kv_shapes
from tests.e2e.conftest import make_model
from tests.engine_contract import EngineContract
from tests.engine_samples import MAX_POSITIONS, SHAPE, begun, busy, decode, long_requests, send_weights

SLOTS, CHUNKS = (8, 5), (7, 64)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, Path]]:
    """Two engines of SGLang and their files; one takes prompts in chunks."""
    model, found = make_model(tmp_path_factory.mktemp("model"), SHAPE), []
    for slots, chunk in zip(SLOTS, CHUNKS, strict=True):
        directory = tmp_path_factory.mktemp("engine")
        sizes = {"slots": slots, "max_positions": MAX_POSITIONS, "prefill_chunk": chunk}
        chosen = settings(model, None, dtype="float32", sleeps=True, **sizes)
        found.append((started(lambda chosen=chosen, directory=directory: launch.start(chosen, directory)), directory))
    return found


@pytest.fixture
def engines(running: list[tuple[Any, Path]]) -> Any:
    found = [
        SGLangEngine(engine, slots, MAX_POSITIONS, KvAccess(engine, directory, kv_shapes(SHAPE, None), "float32", 1))
        for (engine, directory), slots in zip(running, SLOTS, strict=True)
    ]
    yield found
    for engine in found:
        engine.clear()


class TestContract(EngineContract):
    @pytest.fixture
    def engines(self, engines: tuple[RolloutEngine, RolloutEngine]) -> tuple[RolloutEngine, RolloutEngine]:
        return engines


def test_many_samples_are_stopped_as_their_outputs_come(
    engines: tuple[SGLangEngine, SGLangEngine], capfd: pytest.CaptureFixture[str]
) -> None:
    """One by one, at any moment; every stop is heard, and SGLang has nothing to complain of."""
    engine, stopped = engines[0], 0
    send_weights(engine)
    for turn in range(20):
        requests = [replace(one, sample_id=f"{turn}.{one.sample_id}") for one in long_requests(SLOTS[0])]
        engine.submit(requests)
        started = time.monotonic()
        for request in requests:
            decode(engine, functools.partial(begun, engine, request.sample_id))
            stopped += len(engine.abort([request.sample_id]))
        assert time.monotonic() - started < 30, "a stop was lost"
    assert stopped > 100 and not busy(engine)
    output = capfd.readouterr()
    assert "ERROR" not in output.out + output.err and "Traceback" not in output.out + output.err


def test_all_slots_decode_at_once_while_prompts_come_in_chunks(engines: tuple[SGLangEngine, SGLangEngine]) -> None:
    """Each prompt takes five passes, and none waits for another to end."""
    engine = engines[0]
    send_weights(engine)
    for turn in range(3):
        engine.submit(in_chunks(turn))
        decode(engine, lambda: engine.load().running == SLOTS[0])
        engine.clear()


def in_chunks(turn: int) -> list[GenerationRequest]:
    """Requests for all slots, no two with the same first token."""
    prompts = [(number, turn, *range(28)) for number in range(SLOTS[0])]
    return [GenerationRequest(f"{prompt[:2]}", "g", prompt, 1, 40) for prompt in prompts]
