"""SGLang's engine behind the protocol, over a stand-in for its process boundary."""

from __future__ import annotations

import asyncio
import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.ledger import Ledger, Purpose
from rlhfspec_mega.rollout.manager import RolloutManager
from rlhfspec_mega.rollout.protocol import SampleSnapshot
from rlhfspec_mega.rollout.sglang_engine import weights
from rlhfspec_mega.rollout.sglang_engine.engine import SGLangEngine
from rlhfspec_mega.types import (
    EngineReport,
    FinishReason,
    GenerationRequest,
    Prompt,
    Sample,
    TensorInfo,
    WeightTarget,
)
from tests.engine_pool import Pool
from tests.sglang_fake import STOP, FakeEngine, install, token_at

INFOS = [TensorInfo("a", (4, 3), "float32"), TensorInfo("b", (5,), "bfloat16")]


def request(number: int, most: int = 40, **given: Any) -> GenerationRequest:
    prompt = tuple(range(1, 5 + number % 3))
    return GenerationRequest(f"s{number}", f"g{number // 4}", prompt, 100 + number, most, stop_tokens=(STOP,), **given)


def wanted(one: GenerationRequest) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < one.max_new_tokens and (not tokens or tokens[-1] not in one.stop_tokens):
        tokens.append(token_at(one.seed, len(one.prompt_tokens) + len(tokens)))
    return tokens


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def load(engine: SGLangEngine, version: int, target: WeightTarget = WeightTarget.ACTOR) -> dict[str, torch.Tensor]:
    tensors = {"a": torch.randn(4, 3), "b": torch.randn(5).bfloat16()}
    engine.begin_update(version, INFOS, target)
    engine.update_weights([("a", 5, tensors["a"].flatten()[5:]), ("b", 0, tensors["b"])])
    engine.update_weights([("a", 0, tensors["a"].flatten()[:5])])
    engine.end_update(version)
    return tensors


def ready(pace: int = 3) -> SGLangEngine:
    engine = SGLangEngine(FakeEngine(pace), slots=8, max_positions=64)
    load(engine, 0)
    return engine


def drain(engine: SGLangEngine) -> dict[str, Any]:
    found: dict[str, Any] = {}
    while engine.load().running + engine.load().waiting:
        found |= {result.sample_id: result for result in engine.poll(0.01)}
    return found


def test_samples_come_back_with_tokens_and_logprobs() -> None:
    engine, requests = ready(), [request(number) for number in range(9)]
    engine.submit(requests)
    found = drain(engine)
    for one in requests:
        result = found[one.sample_id]
        assert result.tokens == wanted(one)
        assert result.logprobs == [-0.01 * token for token in result.tokens]
        assert result.versions == [0] * len(result.tokens)
        assert result.finish_reason is (FinishReason.STOP if result.tokens[-1] == STOP else FinishReason.LENGTH)
    assert engine.stats()["generated_tokens"] == sum(len(wanted(one)) for one in requests)


def test_progress_adds_up_and_a_sample_goes_on_elsewhere() -> None:
    """Thrice: what it has is exported, and the next engine is given it."""
    one, reported = replace(request(1, most=50), stop_tokens=()), list[int]()
    snapshot = SampleSnapshot(one, [], [], [])
    for _ in range(3):
        engine = ready(pace=1)
        engine.import_sample(snapshot)
        for _ in range(3):
            assert engine.poll(0.004) == []
            reported += [token for gained in engine.progress() for token in gained.tokens]
        snapshot = engine.export_sample(one.sample_id)
        assert not engine.holds(one.sample_id) and snapshot.kv is None
        assert snapshot.tokens == wanted(one)[: len(snapshot.tokens)]
        assert snapshot.reported == len(reported) > 0 and reported == wanted(one)[: len(reported)]
    engine = ready(pace=1)
    engine.import_sample(snapshot)
    assert drain(engine)[one.sample_id].tokens == wanted(one)


def test_an_update_takes_samples_back_and_lets_them_go_on() -> None:
    engine, one = ready(pace=1), request(1, most=30)
    engine.submit([one])
    while not engine.progress():
        engine.poll(0.004)
    tensors = load(engine, 1)
    sent = engine._engine.tokenizer_manager.buckets[-1]
    assert sent.disable_draft_model
    assert all(torch.equal(sent.serialized_named_tensors[0][name], tensor) for name, tensor in tensors.items())
    result = drain(engine)[one.sample_id]
    assert result.tokens == wanted(one)
    assert sorted(result.versions) == result.versions and set(result.versions) == {0, 1}
    assert len({given["rid"] for given in engine._engine.requests}) == len(engine._engine.requests)


def test_weights_of_the_draft_go_through_a_loader_that_passes_the_target_over() -> None:
    engine = ready()
    load(engine, 7, WeightTarget.DRAFT)
    sent = engine._engine.tokenizer_manager.buckets[-1]
    assert not sent.disable_draft_model and engine.load().policy_version == 0
    module, _, name = sent.load_format.rpartition(".")
    loader, loaded = getattr(importlib.import_module(module), name), list[Any]()
    for kind in ("LlamaForCausalLMEagle3", "LlamaForCausalLM"):
        model = type(kind, (), {"load_weights": lambda self, tensors: loaded.append(type(self).__name__)})()
        loader(model, [])
    assert loaded == ["LlamaForCausalLMEagle3"]


def test_asleep_it_holds_nothing_and_weights_wake_it() -> None:
    engine, one = ready(), request(1)
    engine.submit([one])
    with pytest.raises(RunError, match="to sleep with 1 unfinished samples"):
        engine.sleep()
    drain(engine)
    for _ in range(2):
        engine.sleep()
    manager = engine._engine.tokenizer_manager
    assert manager.asleep == {"weights", "kv_cache", "cuda_graph"}
    engine.submit([request(2), request(3)])
    with pytest.raises(RunError, match="no weights"):
        engine.poll(0.0)
    engine.abort(["s3"])
    load(engine, 3, WeightTarget.DRAFT)
    assert manager.asleep == {"kv_cache", "cuda_graph"}
    load(engine, 1)
    assert manager.asleep == set()
    assert drain(engine)["s2"].tokens == wanted(request(2))


def test_buckets_are_sent_when_they_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "BUCKET_BYTES", 10)
    engine = SGLangEngine(FakeEngine(), slots=8, max_positions=64)
    load(engine, 0)
    sent = engine._engine.tokenizer_manager.buckets
    assert [list(bucket.serialized_named_tensors[0]) for bucket in sent] == [["b"], ["a"]]


def test_what_was_aborted_is_returned_and_forgotten() -> None:
    engine, requests = ready(pace=1), [request(number, most=50) for number in (1, 2)]
    engine.submit(requests)
    while len(engine.progress()) < 2:
        engine.poll(0.004)
    (aborted,) = engine.abort(["s1", "unknown"])
    assert aborted.finish_reason is FinishReason.ABORTED
    assert aborted.tokens == wanted(requests[0])[: len(aborted.tokens)]
    engine.clear()
    assert engine.poll(0.01) == [] and engine.load().running == engine.load().waiting == 0
    load(engine, 1)
    assert engine._engine.tokenizer_manager.running == 0


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([("c", 0, torch.zeros(1))], "brings c, which was not announced"),
        ([("b", 0, torch.zeros(4))], "lacks 2 tensors or parts of them: a"),
        ([("b", 0, torch.zeros(5)), ("b", 0, torch.zeros(5))], "brings b twice"),
        ([("b", 0, torch.full((5,), torch.nan))], "brought NaN or infinity in b"),
        ([("b", 3, torch.zeros(5))], "writes elements 3 to 8 of b, which has 5"),
    ],
)
def test_a_bad_update_is_refused(pieces: list[tuple[str, int, torch.Tensor]], words: str) -> None:
    engine = ready()
    engine.begin_update(1, INFOS)
    with pytest.raises(RunError, match=words):
        engine.update_weights(pieces)
        engine.end_update(1)


def test_what_cannot_be_done_is_said() -> None:
    engine = SGLangEngine(FakeEngine(), slots=8, max_positions=64)
    with pytest.raises(UserError, match="needs 104 positions and the engine has 64"):
        engine.submit([request(0, most=100)])
    with pytest.raises(UserError, match="forced length"):
        engine.submit([request(0, ignore_stop=True)])
    with pytest.raises(RunError, match="outside an update"):
        engine.update_weights([])
    engine.submit([request(0)])
    with pytest.raises(RunError, match="no weights"):
        engine.poll(0.0)
    with pytest.raises(RunError, match="has it"):
        engine.submit([request(0)])
    engine.begin_update(0, INFOS)
    with pytest.raises(RunError, match="Update 3 was ended"):
        engine.end_update(3)
    engine._engine.tokenizer_manager.refuses = True
    with pytest.raises(RunError, match="did not load a bucket of weights: no memory"):
        load(engine, 0)


def test_a_sample_that_ends_while_another_is_stopped_has_ended() -> None:
    """It is returned once, neither aborted nor decoded on."""
    engine = ready(pace=1)
    short, long = replace(request(1, most=4), stop_tokens=()), replace(request(2, most=50), stop_tokens=())
    engine.submit([short, long])
    loop = engine._engine.loop
    while not engine._tasks["s1"].done():
        loop.run_until_complete(asyncio.sleep(0.001))
    aborted = engine.abort(["s2", "s1"])
    assert [result.sample_id for result in aborted] == ["s2"] and not engine.holds("s1")
    (ended,) = engine.poll(0.0)
    assert (ended.sample_id, ended.tokens) == ("s1", wanted(short))


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ({"type": "abort", "message": "too long"}, "gave sample s1 up: too long"),
        ({"type": "stop", "matched": 22}, "ended sample s1 after 1 of 40 tokens by"),
        ({"type": "length", "length": 1}, "ended sample s1 after 1 of 40 tokens by"),
    ],
)
def test_another_end_than_was_asked_for_ends_the_run(reason: dict[str, Any], words: str) -> None:
    engine = ready(pace=1)
    engine._engine.reason = reason
    engine.submit([request(1)])
    with pytest.raises(RunError, match=words):
        drain(engine)


def test_an_engine_that_stays_busy_takes_no_weights() -> None:
    engine = ready()
    engine._engine.tokenizer_manager.busy = True
    with pytest.raises(RunError, match="did not become idle"):
        engine.begin_update(1, INFOS)


def test_lost_logprobs_end_the_run() -> None:
    engine = ready()
    engine._engine.loses_logprobs = True
    engine.submit([request(1)])
    with pytest.raises(RunError, match="log-probs for the"):
        drain(engine)


class Worker(SGLangEngine):
    """What the manager calls of an engine's worker."""

    def advance(self, samples: list[SampleSnapshot], seconds: float) -> EngineReport:
        for sample in samples:
            self.import_sample(sample)
        finished = self.poll(seconds)
        return EngineReport(finished, self.progress(), self.load().running + self.load().waiting)

    def leave(self) -> None: ...


@pytest.mark.parametrize("deaths", [{}, {2: True}, {3: False, 5: True}])
def test_the_manager_drives_it(deaths: dict[int, bool]) -> None:
    """Engines die; every sample comes back once."""
    engines = [Worker(FakeEngine(pace=1), slots=4, max_positions=64) for _ in range(2)]
    for engine in engines:
        load(engine, 0)
    pool, requests, ledger = Pool(engines, dict(deaths)), [request(number) for number in range(10)], Ledger()
    prompts = {one.group_id: Prompt(i, "", "", (1,)) for i, one in enumerate(requests)}
    ledger.open([Sample(one.sample_id, 0, prompts[one.group_id], 0) for one in requests], Purpose.TRAIN)
    manager = RolloutManager(pool, pool.wait, revive=pool.revive, poll_seconds=0.01)
    results = manager.generate(requests, ledger, "generate")
    assert {name: result.tokens for name, result in results.items()} == {r.sample_id: wanted(r) for r in requests}
