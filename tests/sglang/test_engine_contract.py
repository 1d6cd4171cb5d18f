"""Real SGLang behind the RolloutEngine protocol: the contract of engines, stops, full batches, KV."""

from __future__ import annotations

import functools
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.sglang_engines import settings, started
from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.rollout.protocol import RolloutEngine
from rlhfspec_mega.rollout.sglang_engine import launch, weights
from rlhfspec_mega.rollout.sglang_engine.engine import SGLangEngine
from rlhfspec_mega.rollout.sglang_engine.kv import KvAccess, kv_shapes
from rlhfspec_mega.types import GenerationRequest
from tests.e2e.conftest import make_model
from tests.engine_contract import EngineContract
from tests.engine_samples import (
    MAX_POSITIONS,
    REQUESTS,
    SHAPE,
    WEIGHTS,
    assert_right,
    busy,
    decode,
    finish,
    generate,
    long_requests,
    send_weights,
)

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


def test_asleep_it_holds_nothing_and_weights_wake_it(engines: tuple[SGLangEngine, SGLangEngine]) -> None:
    engine, (request, other) = engines[0], long_requests(2)
    send_weights(engine)
    engine.submit([request])
    with pytest.raises(RunError, match="to sleep with 1 unfinished samples"):
        engine.sleep()
    finish(engine)
    for _ in range(2):
        engine.sleep()
    engine.submit([request, other])
    with pytest.raises(RunError, match="no weights"):
        engine.poll(0.0)
    engine.abort([other.sample_id])
    send_weights(engine, version=4)
    assert_right(finish(engine), [request])


def test_buckets_are_sent_when_they_are_full(
    engines: tuple[SGLangEngine, SGLangEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "BUCKET_BYTES", 8000)
    engine, sent = engines[0], list[int]()
    serialize = engine._engine._serialize_tensors_per_rank

    def counted(tensors: list[tuple[str, torch.Tensor]], load_format: str | None) -> Any:
        sent.append(sum(tensor.nbytes for _, tensor in tensors))
        return serialize(tensors, load_format)

    monkeypatch.setattr(engine._engine, "_serialize_tensors_per_rank", counted)
    send_weights(engine)
    assert len(sent) > 3 and all(size >= 8000 for size in sent[:-1])
    assert sum(sent) == sum(tensor.nbytes for tensor in WEIGHTS.values())
    assert_right(generate(engine, REQUESTS[:6]), REQUESTS[:6])


def test_a_forced_length_is_refused(engines: tuple[SGLangEngine, SGLangEngine]) -> None:
    """SGLang cannot mask stop tokens before the noise."""
    forced = replace(long_requests(1)[0], stop_tokens=(3,), ignore_stop=True)
    with pytest.raises(UserError, match="forced length"):
        engines[0].submit([forced])


def test_many_samples_are_stopped_as_their_outputs_come(
    engines: tuple[SGLangEngine, SGLangEngine], caplog: pytest.LogCaptureFixture
) -> None:
    """One by one, at any moment; every stop is heard, and SGLang has nothing to complain of."""
    engine, stopped, turns = engines[0], 0, 20
    send_weights(engine)
    for turn in range(turns):
        requests = [replace(one, sample_id=f"{turn}.{one.sample_id}") for one in long_requests(SLOTS[0])]
        engine.submit(requests)
        started = time.monotonic()
        for request in requests:
            decode(engine, functools.partial(begun_or_ended, engine, request.sample_id))
            stopped += len(engine.abort([request.sample_id]))
        assert time.monotonic() - started < 30, "a stop was lost"
        assert not busy(engine)
    assert stopped > turns * SLOTS[0] / 2, "else they were not stopped, they had ended"
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def begun_or_ended(engine: SGLangEngine, sample_id: str) -> bool:
    return not engine.is_waiting(sample_id)


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
