"""The torch engine: the contract of engines, any schedule, forced lengths, refusals that are its own."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.rollout.protocol import RolloutEngine
from rlhfspec_mega.rollout.torch_engine.engine import TorchEngine
from rlhfspec_mega.types import FinishReason, GenerationRequest, GenerationResult, TensorInfo
from tests.engine_contract import EngineContract
from tests.engine_samples import (
    JUDGE,
    MAX_POSITIONS,
    SHAPE,
    WEIGHTS,
    assert_right,
    finish,
    generate,
    infos,
    make_requests,
    random_weights,
    references,
    send_weights,
)
from tests.near_tie import assert_same

__all__ = ["WEIGHTS", "random_weights"]
REQUESTS = make_requests(forced=0.2)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def empty_engine(slots: int, prefill_chunk: int) -> TorchEngine:
    sizes = {"slots": slots, "max_positions": MAX_POSITIONS, "prefill_chunk": prefill_chunk}
    return TorchEngine(SHAPE, dtype=torch.float32, device="cpu", **sizes)


def make_engine(slots: int = 16, prefill_chunk: int = 64) -> TorchEngine:
    engine = empty_engine(slots, prefill_chunk)
    send_weights(engine)
    return engine


@pytest.fixture(scope="module")
def alone() -> dict[str, GenerationResult]:
    """The results that every way of decoding must reproduce."""
    return references(REQUESTS)


class TestContract(EngineContract):
    @pytest.fixture
    def engines(self) -> tuple[RolloutEngine, RolloutEngine]:
        return empty_engine(6, 64), empty_engine(5, 7)


def test_the_samples_are_worth_comparing(alone):
    results = alone.values()
    tokens = [token for result in results for token in result.tokens]
    assert len(tokens) > 200 and len(set(tokens)) > SHAPE.vocab_size // 2
    assert {result.finish_reason for result in results} == {FinishReason.STOP, FinishReason.LENGTH}
    logprobs = torch.tensor([lp for result in results for lp in result.logprobs])
    assert logprobs.mean() > -2.2  # log(29) = 3.4: far from flat


@pytest.mark.parametrize("slots", [1, 4, 16, 64])
@pytest.mark.parametrize("prefill_chunk", [1, 5, 64])
def test_same_tokens_whatever_batch_and_chunk(slots, prefill_chunk):
    assert_right(generate(make_engine(slots, prefill_chunk), REQUESTS), REQUESTS)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_same_tokens_under_any_schedule(data):
    """Two engines, samples submitted, migrated and aborted at random: what comes out is right as far as it goes."""
    engines = [make_engine(data.draw(st.integers(1, 9)), data.draw(st.integers(1, 50))) for _ in range(2)]
    place: dict[str, int] = {}
    waiting, results = list(REQUESTS), {}
    for _ in range(data.draw(st.integers(5, 25))):
        action = data.draw(st.sampled_from(("submit", "poll", "poll", "move", "abort")))
        if action == "submit" and waiting:
            engine, count = data.draw(st.integers(0, 1)), data.draw(st.integers(1, 6))
            engines[engine].submit(waiting[:count])
            place |= {request.sample_id: engine for request in waiting[:count]}
            del waiting[:count]
        elif action == "poll":
            results |= {r.sample_id: r for engine in engines for r in engine.poll(0)}
        elif unfinished := sorted(place.keys() - results.keys()):
            sample_id = data.draw(st.sampled_from(unfinished))
            if action == "move":
                snapshot = engines[place[sample_id]].export_sample(sample_id)
                place[sample_id] = 1 - place[sample_id]
                engines[place[sample_id]].import_sample(snapshot)
            else:
                results |= {r.sample_id: r for r in engines[place[sample_id]].abort([sample_id])}
    engines[0].submit(waiting)
    results |= finish(engines[0]) | finish(engines[1])
    assert_right(results, REQUESTS, whole=False)


def test_migration_takes_kv_along():
    source, target = make_engine(slots=8), make_engine(slots=5, prefill_chunk=7)
    source.submit(REQUESTS)
    results = [result for _ in range(6) for result in source.poll(0)]
    ended = {result.sample_id for result in results}
    snapshots = [source.export_sample(r.sample_id) for r in REQUESTS if r.sample_id not in ended]
    assert any(snapshot.kv is not None and snapshot.tokens for snapshot in snapshots)
    assert any(snapshot.kv is None for snapshot in snapshots)
    for snapshot in snapshots:
        target.import_sample(snapshot)
    assert_right({r.sample_id: r for r in results} | finish(target), REQUESTS)


def test_a_forced_length_masks_stop_tokens():
    free = GenerationRequest("free", "g", (1, 2, 3), seed=11, max_new_tokens=40)
    tokens = generate(make_engine(), [free])["free"].tokens
    stop = tokens[12]
    forced = dataclasses.replace(free, sample_id="forced", stop_tokens=(stop,), ignore_stop=True)
    result = generate(make_engine(), [forced])["forced"]
    assert result.finish_reason is FinishReason.LENGTH and len(result.tokens) == 40
    first = tokens.index(stop)
    assert result.tokens[:first] == tokens[:first] and stop not in result.tokens


def test_load_and_stats_count_to_the_step():
    engine = make_engine(slots=4, prefill_chunk=64)
    requests = [GenerationRequest(str(i), "g", (5, 6, 7), seed=i, max_new_tokens=8) for i in range(6)]
    engine.submit(requests)
    for _ in range(3):
        engine.poll(0)
    load = engine.load()
    assert (load.running, load.waiting, load.slots) == (4, 2, 4)
    assert (load.decode_steps, load.generated_tokens, load.kv_tokens) == (3, 12, 4 * (3 + 3 - 1))
    finish(engine)
    stats = engine.stats()
    assert (stats["generated_tokens"], stats["finished_samples"], stats["decode_steps"]) == (48, 6, 16)
    assert stats["prefill_tokens"] == 2  # one prompt of three tokens, once for the group, without its last token


def test_an_update_is_refused_before_it_comes():
    engine = make_engine()
    with pytest.raises(RunError, match=r"lm_head\.weight"):
        engine.begin_update(2, [*infos(), TensorInfo("lm_head.weight", (29, 32), "float32")])
    with pytest.raises(RunError, match=r"model\.norm\.weight with shape \(31,\)"):
        engine.begin_update(2, infos(**{"model.norm.weight": (31,)}))
    with pytest.raises(RunError, match=r"lacks 1, among them model\.norm\.weight"):
        empty_engine(1, 1).begin_update(0, [info for info in infos() if info.name != "model.norm.weight"])


def test_bad_forced_lengths_are_refused():
    forced = GenerationRequest("a", "g", (1,), 0, 2, stop_tokens=tuple(range(29)), ignore_stop=True)
    with pytest.raises(UserError, match="every token is one"):
        make_engine().submit([forced])


def test_bad_snapshots_are_refused():
    engine = make_engine()
    engine.submit([GenerationRequest("a", "g", (1, 2), seed=0, max_new_tokens=4)])
    engine.poll(0)
    snapshot = engine.export_sample("a")
    with pytest.raises(RunError, match="does not have"):
        engine.export_sample("a")
    assert snapshot.kv is not None and snapshot.kv.shape == (2, 2, 2, 2, 12)
    for bad, sentence in (
        (dataclasses.replace(snapshot, kv=snapshot.kv[:, :, :, :1]), "KV of shape"),
        (dataclasses.replace(snapshot, logprobs=[]), "0 log-probs"),
        (dataclasses.replace(snapshot, tokens=[1] * 4, logprobs=[0.0] * 4, versions=[1] * 4), "unfinished"),
    ):
        with pytest.raises(UserError, match=sentence):
            engine.import_sample(bad)
    engine.import_sample(snapshot)
    assert len(finish(engine)["a"].tokens) == 4


def test_the_near_tie_rule_catches_a_wrong_token():
    """The comparison used above must fail when a token is not the one the noise chose."""
    right = max(references(REQUESTS).values(), key=lambda result: len(result.tokens))
    (request,) = (one for one in REQUESTS if one.sample_id == right.sample_id)
    wrong = dataclasses.replace(right, tokens=[*right.tokens[:5], (right.tokens[5] + 1) % 29, *right.tokens[6:]])
    with pytest.raises(AssertionError, match="tokens part at 5"):
        assert_same({request.sample_id: right}, {request.sample_id: wrong}, [request], JUDGE)


@pytest.mark.parametrize("name", ["slots", "max_positions", "prefill_chunk"])
def test_sizes_of_zero_are_refused(name):
    sizes = {"slots": 1, "max_positions": 8, "prefill_chunk": 1} | {name: 0}
    with pytest.raises(UserError, match=name):
        TorchEngine(SHAPE, dtype=torch.float32, device="cpu", **sizes)
