"""What SGLang's engine does when results come late or SGLang fails; tests/sglang has all else, over the real one."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlhfspec_mega.errors import RunError, SilentEngineError
from rlhfspec_mega.rollout.sglang_engine import engine as engine_module
from rlhfspec_mega.rollout.sglang_engine.engine import SGLangEngine
from rlhfspec_mega.rollout.sglang_engine.samples import SGLangSample
from rlhfspec_mega.types import FinishReason, GenerationRequest, TensorInfo, WeightTarget
from tests.sglang_fake import STOP, FakeEngine, install, token_at

INFOS = [TensorInfo("a", (4, 3), "float32"), TensorInfo("b", (5,), "bfloat16")]


def request(number: int, most: int = 40) -> GenerationRequest:
    prompt = tuple(range(1, 5 + number % 3))
    return GenerationRequest(f"s{number}", f"g{number // 4}", prompt, 100 + number, most, stop_tokens=(STOP,))


def wanted(one: GenerationRequest) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < one.max_new_tokens and (not tokens or tokens[-1] not in one.stop_tokens):
        tokens.append(token_at(one.seed, len(one.prompt_tokens) + len(tokens)))
    return tokens


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def load(engine: SGLangEngine, version: int) -> None:
    engine.begin_update(version, INFOS)
    engine.update_weights([("a", 0, torch.randn(12)), ("b", 0, torch.randn(5).bfloat16())])
    engine.end_update(version)


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def engine(fake: FakeEngine) -> SGLangEngine:
    found = SGLangEngine(fake, slots=8, max_positions=64)
    load(found, 0)
    return found


def drain(engine: SGLangEngine) -> dict[str, Any]:
    found: dict[str, Any] = {}
    while not engine.idle:
        found |= {result.sample_id: result for result in engine.poll(0.01)}
    return found


def test_results_that_come_late_are_taken(engine: SGLangEngine, fake: FakeEngine) -> None:
    """Of a step that was under way when its sample was stopped: others go on from there, and so does it."""
    fake.late = 2
    one, other = (replace(request(number, most=50), stop_tokens=()) for number in (1, 2))
    engine.submit([one, other])
    while len(engine.progress()) < 2:
        engine.poll(0.004)
    before = len(engine._held["s1"].tokens)
    snapshot = engine.export_sample("s1")
    assert len(snapshot.tokens) >= before + 2 and snapshot.tokens == wanted(one)[: len(snapshot.tokens)]
    engine.import_sample(snapshot)
    assert {name: result.tokens for name, result in drain(engine).items()} == {"s1": wanted(one), "s2": wanted(other)}
    assert len({given["rid"] for given in fake.requests}) == 3, "one that comes back is another request"


def test_a_sample_whose_last_token_comes_late_has_ended(engine: SGLangEngine, fake: FakeEngine) -> None:
    fake.late = 50
    one = replace(request(1, most=10), stop_tokens=())
    engine.submit([one])
    while engine.is_waiting("s1"):
        engine.poll(0.001)
    with pytest.raises(RunError, match="s1 is not on this engine any more"):
        engine.export_sample("s1")
    (result,) = engine.poll(0.0)
    assert result.tokens == wanted(one) and result.finish_reason is FinishReason.LENGTH


def test_a_sample_that_ends_while_another_is_stopped_has_ended(engine: SGLangEngine, fake: FakeEngine) -> None:
    """It is returned once, neither aborted nor decoded on."""
    short, long = replace(request(1, most=4), stop_tokens=()), replace(request(2, most=50), stop_tokens=())
    engine.submit([short, long])
    while not engine._tasks["s1"].done():
        fake.loop.run_until_complete(asyncio.sleep(0.001))
    aborted = engine.abort(["s2", "s1"])
    assert [result.sample_id for result in aborted] == ["s2"] and not engine.has_sample("s1")
    (ended,) = engine.poll(0.0)
    assert (ended.sample_id, ended.tokens) == ("s1", wanted(short))


def test_a_stop_that_is_heard_too_late_loses_no_sample(
    engine: SGLangEngine, fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is called silent; where nobody ends it for that, the sample is asked for anew."""
    monkeypatch.setattr(engine_module, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(engine_module, "ASK_SECONDS", 0.002)
    fake.tokenizer_manager.deaf = True
    one = replace(request(1, most=55), stop_tokens=())
    engine.submit([one])
    engine.poll(0.004)
    with pytest.raises(SilentEngineError, match="did not stop s1 within"):
        engine.abort(["s1"])
    fake.tokenizer_manager.aborted.add(engine._held["s1"].rid)
    assert drain(engine)["s1"].tokens == wanted(one)
    assert len(fake.requests) == 2


def test_an_engine_that_puts_out_nothing_is_called_silent(
    engine: SGLangEngine, fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After so much time of polls, not of anything else."""
    monkeypatch.setattr(engine_module, "SILENCE_SECONDS", 0.5)  # a busy machine takes long for one short poll
    fake.seconds = 60.0
    engine.submit([request(1, most=50)])
    time.sleep(0.6)
    engine.poll(0.005)
    with pytest.raises(SilentEngineError, match="put out nothing"):
        for _ in range(100):
            engine.poll(0.01)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ({"type": "abort", "message": "too long"}, "gave sample s1 up: too long"),
        ({"type": "stop", "matched": 22}, "ended sample s1 after 1 of 40 tokens by"),
        ({"type": "length", "length": 1}, "ended sample s1 after 1 of 40 tokens by"),
    ],
)
def test_another_end_than_was_asked_for_ends_the_run(
    reason: dict[str, Any], words: str, engine: SGLangEngine, fake: FakeEngine
) -> None:
    fake.reason = reason
    engine.submit([request(1)])
    with pytest.raises(RunError, match=words):
        drain(engine)


def test_tokens_behind_a_stop_token_are_dropped() -> None:
    """SGLang returns them if the step that accepted the stop token reached the limit, and calls it an end by length."""
    sample = SGLangSample(request(1, most=5))
    sample.take({"output_ids": [3, 4], "meta_info": {"output_token_logprobs": [(-0.1, 3), (-0.2, 4)]}}, 0)
    found = [(-0.1 * (at + 1), token) for at, token in enumerate((3, 4, STOP, 6, 7))]
    meta = {"output_token_logprobs": found, "finish_reason": {"type": "length", "length": 5}}
    sample.take({"output_ids": [token for _, token in found], "meta_info": meta}, 0)
    assert sample.reason is FinishReason.STOP and sample.tokens == [3, 4, STOP]
    assert len(sample.logprobs) == len(sample.versions) == 3


def test_lost_logprobs_end_the_run(engine: SGLangEngine, fake: FakeEngine) -> None:
    fake.loses_logprobs = True
    engine.submit([request(1)])
    with pytest.raises(RunError, match="log-probs for the"):
        drain(engine)


def test_an_update_of_the_draft_that_was_given_up_stops_nothing(engine: SGLangEngine, fake: FakeEngine) -> None:
    """A silent engine drops out of a transfer; heard again, it is asked for samples with the update still open."""
    engine.submit([request(1)])
    engine.begin_update(1, INFOS, WeightTarget.DRAFT)
    engine.update_weights([("a", 0, torch.randn(12))])
    assert engine.poll(0.01) == [] and not engine.idle
    engine.abandon_draft_update()
    assert drain(engine)["s1"].tokens == wanted(request(1))
    with pytest.raises(RunError, match="begin_update"):
        engine.end_update(1)
    assert engine.load().policy_version == 0


def test_an_engine_that_stays_busy_takes_no_weights(engine: SGLangEngine, fake: FakeEngine) -> None:
    fake.tokenizer_manager.busy = True
    with pytest.raises(RunError, match="did not become idle"):
        engine.begin_update(1, INFOS)


def test_weights_that_are_refused_end_the_run(engine: SGLangEngine, fake: FakeEngine) -> None:
    fake.tokenizer_manager.refuses = True
    with pytest.raises(RunError, match="did not load a bucket of weights: no memory"):
        load(engine, 1)
