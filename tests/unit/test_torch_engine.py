"""The torch engine: the same tokens however samples are batched, ordered and moved; limits, updates, refusals."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.models.transformer import Transformer, causal_attention, sequence_logprobs
from rlhfspec_mega.rollout.torch_engine.engine import TorchEngine
from rlhfspec_mega.sampling.noise import sample_seed
from rlhfspec_mega.types import FinishReason, GenerationRequest, GenerationResult, TensorInfo
from tests.near_tie import assert_same

SHAPE = ModelShape("qwen3", 32, 2, 4, 2, 12, 48, 29, 96, 10000.0, 1e-6, True)
MAX_POSITIONS = 72


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_weights(seed: int, shape: ModelShape = SHAPE) -> dict[str, torch.Tensor]:
    """Weights large enough that the next token is far from uniform and depends on the whole context."""
    generator = torch.Generator().manual_seed(seed)
    names = Transformer(shape, max_positions=1, dtype=torch.float32, device="cpu").hf_tensors()
    return {
        name: torch.randn(t.shape, generator=generator) * (0.35 if t.dim() == 2 else 0.2) + (t.dim() == 1)
        for name, t in names.items()
    }


WEIGHTS = random_weights(0)


def send_weights(engine: TorchEngine, weights: dict[str, torch.Tensor], version: int = 1, piece: int = 500) -> None:
    engine.begin_update(version, [TensorInfo(name, tuple(t.shape), "float32") for name, t in weights.items()])
    for name, tensor in weights.items():
        for first in reversed(range(0, tensor.numel(), piece)):
            engine.update_weights([(name, first, tensor.flatten()[first : first + piece])])
    engine.end_update(version)


def make_engine(slots: int = 16, prefill_chunk: int = 64, weights: dict[str, torch.Tensor] = WEIGHTS) -> TorchEngine:
    sizes = {"slots": slots, "max_positions": MAX_POSITIONS, "prefill_chunk": prefill_chunk}
    engine = TorchEngine(SHAPE, dtype=torch.float32, device="cpu", **sizes)
    send_weights(engine, weights)
    return engine


def make_requests(groups: int = 7, members: int = 3) -> list[GenerationRequest]:
    """Groups with prompts of 1 to 37 tokens; members differ in seed, temperature, limit and stop tokens."""
    rng = random.Random(0)
    requests = []
    for group in range(groups):
        prompt = tuple(rng.randrange(SHAPE.vocab_size) for _ in range(1 + 6 * group % 43))
        for member in range(members):
            requests.append(
                GenerationRequest(
                    sample_id=f"{group}.{member}",
                    group_id=str(group),
                    prompt_tokens=prompt,
                    seed=sample_seed(0, 0, group, member),
                    max_new_tokens=rng.choice((1, 5, 20, 35)),
                    temperature=rng.choice((0.0, 0.8, 1.0)),
                    stop_tokens=rng.choice(((), (3,), (3, 17))),
                    ignore_stop=rng.random() < 0.2,
                )
            )
    return requests


REQUESTS = make_requests()


def finish(engine: TorchEngine) -> dict[str, GenerationResult]:
    results = []
    while engine.load().running or engine.load().waiting:
        results += engine.poll(0.05)
    return {result.sample_id: result for result in results + engine.poll(0)}


def generate(engine: TorchEngine, requests: Sequence[GenerationRequest]) -> dict[str, GenerationResult]:
    engine.submit(requests)
    return finish(engine)


def make_judge(weights: dict[str, torch.Tensor]):
    """Logits after a token sequence, by the whole-sequence forward in float64."""
    model = Transformer(SHAPE, max_positions=MAX_POSITIONS, dtype=torch.float64, device="cpu")
    model.load(weights)

    def logits(tokens: list[int]) -> torch.Tensor:
        hidden = model.hidden(torch.tensor([tokens]), torch.arange(len(tokens))[None], causal_attention(SHAPE))
        return model.logits(hidden)[0, -1]

    return logits


JUDGE = make_judge(WEIGHTS)


@pytest.fixture(scope="module")
def alone() -> dict[str, GenerationResult]:
    """Each sample decoded by itself: the results every other way of decoding must reproduce."""
    results = {}
    for request in REQUESTS:
        results |= generate(make_engine(slots=1), [request])
    return results


def test_the_samples_are_worth_comparing(alone):
    tokens = [token for result in alone.values() for token in result.tokens]
    assert len(tokens) > 200 and len(set(tokens)) > SHAPE.vocab_size // 2
    assert {result.finish_reason for result in alone.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    logprobs = torch.tensor([lp for result in alone.values() for lp in result.logprobs])
    assert logprobs.mean() > -2.2  # log(29) = 3.4: far from flat


@pytest.mark.parametrize("slots", [1, 4, 16, 64])
@pytest.mark.parametrize("prefill_chunk", [1, 5, 64])
def test_same_tokens_whatever_batch_and_chunk(alone, slots, prefill_chunk):
    assert_same(alone, generate(make_engine(slots, prefill_chunk), REQUESTS), REQUESTS, JUDGE)


@pytest.mark.parametrize("seed", range(3))
def test_same_tokens_whatever_order_and_time_of_submission(alone, seed):
    order = random.Random(seed).sample(REQUESTS, len(REQUESTS))
    engine, results = make_engine(slots=6), []
    for request in order:
        engine.submit([request])
        results += engine.poll(0)
    assert_same(alone, {r.sample_id: r for r in results} | finish(engine), REQUESTS, JUDGE)


@pytest.mark.parametrize("with_kv", [True, False])
def test_same_tokens_after_migration(alone, with_kv):
    source, target = make_engine(slots=8), make_engine(slots=5, prefill_chunk=7)
    source.submit(REQUESTS)
    results = [result for _ in range(6) for result in source.poll(0)]
    ended = {result.sample_id for result in results}
    snapshots = [source.export_sample(r.sample_id) for r in REQUESTS if r.sample_id not in ended]
    assert source.load().running == source.load().waiting == 0
    assert any(snapshot.kv is not None and snapshot.tokens for snapshot in snapshots)
    assert any(snapshot.kv is None for snapshot in snapshots)
    for snapshot in snapshots:
        target.import_sample(snapshot if with_kv else dataclasses.replace(snapshot, kv=None))
    assert_same(alone, {r.sample_id: r for r in results} | finish(target), REQUESTS, JUDGE)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_same_tokens_under_any_schedule(alone, data):
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
    for request in REQUESTS:
        result, expected = results[request.sample_id], alone[request.sample_id]
        if result.finish_reason is FinishReason.ABORTED:
            cut = slice(0, len(result.tokens))
            expected = GenerationResult(
                request.sample_id, expected.tokens[cut], expected.logprobs[cut], [], FinishReason.ABORTED
            )
        assert_same({request.sample_id: expected}, {request.sample_id: result}, [request], JUDGE)


def test_logprobs_are_the_whole_sequence_ones(alone):
    model = Transformer(SHAPE, max_positions=MAX_POSITIONS, dtype=torch.float32, device="cpu")
    model.load(WEIGHTS)
    for request in REQUESTS:
        result = alone[request.sample_id]
        tokens = torch.tensor([[*request.prompt_tokens, *result.tokens]])
        expected = sequence_logprobs(model, tokens, temperature=request.temperature, chunk=7)
        torch.testing.assert_close(torch.tensor(result.logprobs), expected[0, -len(result.tokens) :], rtol=0, atol=1e-4)


def test_stop_token_ends_the_sample_and_is_its_last():
    free = GenerationRequest("free", "g", (1, 2, 3), seed=11, max_new_tokens=40)
    tokens = generate(make_engine(), [free])["free"].tokens
    stop = tokens[12]
    stopped = dataclasses.replace(free, sample_id="stopped", stop_tokens=(stop,))
    forced = dataclasses.replace(stopped, sample_id="forced", ignore_stop=True)
    results = generate(make_engine(), [stopped, forced])
    first = tokens.index(stop)
    assert results["stopped"].tokens == tokens[: first + 1]
    assert results["stopped"].finish_reason is FinishReason.STOP
    assert results["forced"].finish_reason is FinishReason.LENGTH and len(results["forced"].tokens) == 40
    assert results["forced"].tokens[:first] == tokens[:first] and stop not in results["forced"].tokens


def test_limits_up_to_the_last_position():
    prompt = tuple(range(20))
    requests = [
        GenerationRequest(f"{limit}", "g", prompt, seed=limit, max_new_tokens=limit)
        for limit in (1, 2, MAX_POSITIONS - len(prompt))
    ]
    results = generate(make_engine(slots=2, prefill_chunk=3), requests)
    assert [len(results[r.sample_id].tokens) for r in requests] == [r.max_new_tokens for r in requests]
    assert all(len(r.tokens) == len(r.logprobs) == len(r.versions) for r in results.values())


def test_abort_returns_progress_and_frees_the_slots(alone):
    engine = make_engine(slots=6)
    engine.submit(REQUESTS)
    done = {result.sample_id: result for _ in range(4) for result in engine.poll(0)}
    keep = REQUESTS[-1].sample_id
    ids = [request.sample_id for request in REQUESTS if request.sample_id != keep]
    aborted = {result.sample_id: result for result in engine.abort([*ids, *ids, "unknown"])}
    assert aborted.keys() == set(ids) - done.keys()
    assert any(result.tokens for result in aborted.values())
    for sample_id, result in aborted.items():
        assert result.finish_reason is FinishReason.ABORTED
        assert result.tokens == alone[sample_id].tokens[: len(result.tokens)]
    assert finish(engine)[keep].tokens == alone[keep].tokens
    assert engine.abort(ids) == []


def test_load_and_stats_count():
    engine = make_engine(slots=4, prefill_chunk=64)
    requests = [GenerationRequest(str(i), "g", (5, 6, 7), seed=i, max_new_tokens=8) for i in range(6)]
    engine.submit(requests)
    assert (engine.load().running, engine.load().waiting, engine.load().policy_version) == (0, 6, 1)
    for _ in range(3):
        engine.poll(0)
    load = engine.load()
    assert (load.running, load.waiting, load.slots) == (4, 2, 4)
    assert (load.decode_steps, load.generated_tokens, load.kv_tokens) == (3, 12, 4 * (3 + 3 - 1))
    finish(engine)
    stats = engine.stats()
    assert (stats["generated_tokens"], stats["finished_samples"], stats["decode_steps"]) == (48, 6, 16)
    assert stats["prefill_tokens"] == 2  # one prompt of three tokens, once for the group, without its last token


def test_each_token_records_its_policy_version_and_waiting_samples_take_the_new_weights():
    engine, new = make_engine(slots=2), random_weights(1)
    requests = [GenerationRequest(str(i), "g", (4, 9, 2, 8), seed=i, max_new_tokens=10) for i in range(3)]
    before = generate(make_engine(), requests)
    engine.submit(requests)
    for _ in range(4):
        engine.poll(0)
    send_weights(engine, new, version=7)
    results = finish(engine)
    assert results["0"].versions == [1] * 4 + [7] * 6
    assert results["0"].tokens[:4] == before["0"].tokens[:4]
    assert results["2"].versions == [7] * 10
    fresh = generate(make_engine(weights=new), requests)
    assert_same({"2": fresh["2"]}, {"2": results["2"]}, requests[2:], make_judge(new))
    assert results["2"].tokens != before["2"].tokens


def infos(**changes: tuple[int, ...]) -> list[TensorInfo]:
    return [TensorInfo(name, changes.get(name, tuple(t.shape)), "float32") for name, t in WEIGHTS.items()]


def test_update_refuses_what_it_does_not_hold():
    engine = make_engine()
    with pytest.raises(RunError, match=r"lm_head\.weight"):
        engine.begin_update(2, [*infos(), TensorInfo("lm_head.weight", (29, 32), "float32")])
    with pytest.raises(RunError, match=r"model\.norm\.weight with shape \(31,\)"):
        engine.begin_update(2, infos(**{"model.norm.weight": (31,)}))
    with pytest.raises(RunError, match="begin_update"):
        engine.update_weights([("model.norm.weight", 0, torch.zeros(32))])
    with pytest.raises(RunError, match="begin_update"):
        engine.end_update(2)


@pytest.mark.parametrize(
    "spans", [[], [(0, 31)], [(1, 32)], [(0, 16), (17, 32)], [(0, 16), (0, 16)], [(0, 20), (8, 32)]]
)
def test_update_names_the_tensor_that_is_incomplete(spans):
    engine = make_engine()
    engine.submit(REQUESTS[:1])
    engine.begin_update(2, infos())
    norm = WEIGHTS["model.norm.weight"]
    engine.update_weights([(name, 0, t.flatten()) for name, t in WEIGHTS.items() if name != "model.norm.weight"])
    engine.update_weights([("model.norm.weight", first, norm[first:last]) for first, last in spans])
    with pytest.raises(RunError, match=r"of model\.norm\.weight\.$"):
        engine.end_update(2)
    assert engine.poll(0.01) == [] and engine.load().decode_steps == 0  # mixed weights: nothing is decoded
    send_weights(engine, WEIGHTS, version=3)
    assert set(finish(engine)) == {REQUESTS[0].sample_id}
    assert engine.load().policy_version == 3


def test_update_refuses_overruns_and_other_versions():
    engine = make_engine()
    engine.begin_update(2, infos()[:1])
    with pytest.raises(RunError, match="not announced"):
        engine.update_weights([("model.norm.weight", 0, torch.zeros(32))])
    with pytest.raises(RunError, match="elements 900 to 932"):
        engine.update_weights([("model.embed_tokens.weight", 900, torch.zeros(32))])
    with pytest.raises(RunError, match="Update 3 was ended, but update 2"):
        engine.end_update(3)


def test_nothing_is_decoded_before_all_weights_have_come():
    engine = TorchEngine(SHAPE, slots=1, max_positions=8, prefill_chunk=1, dtype=torch.float32, device="cpu")
    assert engine.load().policy_version == -1 and engine.poll(0) == []
    engine.submit([GenerationRequest("a", "a", (1,), seed=0, max_new_tokens=1)])
    with pytest.raises(RunError, match="no weights"):
        engine.poll(0)
    with pytest.raises(RunError, match=r"lacks 1, among them model\.norm\.weight"):
        engine.begin_update(0, [info for info in infos() if info.name != "model.norm.weight"])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"prompt_tokens": ()}, "empty prompt"),
        ({"prompt_tokens": (29,)}, "token 29"),
        ({"prompt_tokens": (-1,)}, "token -1"),
        ({"stop_tokens": (99,)}, "token 99"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"max_new_tokens": MAX_POSITIONS}, "lower rollout.max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"seed": 1 << 63}, "sample_seed"),
        ({"stop_tokens": tuple(range(29)), "ignore_stop": True}, "whole vocabulary"),
        ({"sample_id": "here"}, "already"),
    ],
)
def test_bad_requests_are_refused_and_nothing_is_queued(change, sentence):
    engine = make_engine()
    good = GenerationRequest("good", "g", (1,), seed=0, max_new_tokens=2)
    engine.submit([dataclasses.replace(good, sample_id="here")])
    with pytest.raises(UserError, match=sentence):
        engine.submit([good, dataclasses.replace(good, **({"sample_id": "bad"} | change))])
    assert set(finish(engine)) == {"here"}
    assert set(generate(engine, [good])) == {"good"}


def test_bad_snapshots_are_refused():
    engine = make_engine()
    engine.submit([GenerationRequest("a", "g", (1, 2), seed=0, max_new_tokens=4)])
    engine.poll(0)
    snapshot = engine.export_sample("a")
    with pytest.raises(RunError, match="does not hold"):
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


def test_the_near_tie_rule_catches_a_wrong_token(alone):
    """The comparison used above must fail when a token is not the one the noise chose."""
    request = max(REQUESTS, key=lambda r: len(alone[r.sample_id].tokens))
    right = alone[request.sample_id]
    wrong = dataclasses.replace(right, tokens=[*right.tokens[:5], (right.tokens[5] + 1) % 29, *right.tokens[6:]])
    with pytest.raises(AssertionError, match="tokens part at 5"):
        assert_same({request.sample_id: right}, {request.sample_id: wrong}, [request], JUDGE)


@pytest.mark.parametrize("name", ["slots", "max_positions", "prefill_chunk"])
def test_sizes_of_zero_are_refused(name):
    sizes = {"slots": 1, "max_positions": 8, "prefill_chunk": 1} | {name: 0}
    with pytest.raises(UserError, match=name):
        TorchEngine(SHAPE, dtype=torch.float32, device="cpu", **sizes)
