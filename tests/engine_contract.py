"""What any RolloutEngine does: the same tests for every engine, held against whole-sequence passes of the model.

A file of tests derives a class from `EngineContract` and gives it the fixture `engines`.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import pytest
import torch

from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.ledger.entry import Purpose
from rlhfspec_mega.ledger.ledger import Ledger
from rlhfspec_mega.rollout.manager import RolloutManager
from rlhfspec_mega.rollout.protocol import RolloutEngine, SampleSnapshot
from rlhfspec_mega.types import FinishReason, GenerationRequest, GenerationResult, Prompt, Sample
from tests.engine_pool import Pool
from tests.engine_samples import (
    MAX_POSITIONS,
    OTHER_JUDGE,
    OTHER_WEIGHTS,
    REQUESTS,
    SHORTEST_POLL,
    WEIGHTS,
    Driven,
    assert_right,
    begun,
    busy,
    decode,
    finish,
    generate,
    hand_over,
    infos,
    long_requests,
    reference,
    send_weights,
)


class EngineContract:
    """Tests of the protocol over two engines of SHAPE in float32 with room for samples of MAX_POSITIONS tokens."""

    @pytest.fixture
    def engines(self) -> tuple[RolloutEngine, RolloutEngine]:
        """Two that hold no weights and no samples, and count from zero; the first decodes more than four at once."""
        raise NotImplementedError

    @pytest.fixture
    def engine(self, engines: tuple[RolloutEngine, RolloutEngine]) -> RolloutEngine:
        send_weights(engines[0])
        return engines[0]

    @pytest.fixture
    def other(self, engines: tuple[RolloutEngine, RolloutEngine]) -> RolloutEngine:
        send_weights(engines[1])
        return engines[1]

    # What a sample is

    @pytest.mark.parametrize("at_once", [1, 4, len(REQUESTS)])
    def test_tokens_and_logprobs_are_those_of_whole_sequences(self, engine: RolloutEngine, at_once: int) -> None:
        found: dict[str, GenerationResult] = {}
        for first in range(0, len(REQUESTS), at_once):
            found |= generate(engine, REQUESTS[first : first + at_once])
        assert_right(found, REQUESTS)

    @pytest.mark.parametrize("seed", range(3))
    def test_same_tokens_whatever_order_and_time_of_submission(self, engine: RolloutEngine, seed: int) -> None:
        results = []
        for request in random.Random(seed).sample(REQUESTS, len(REQUESTS)):
            engine.submit([request])
            results += engine.poll(0)
        assert_right({r.sample_id: r for r in results} | finish(engine), REQUESTS)

    @pytest.mark.parametrize("with_kv", [True, False])
    def test_same_tokens_after_migration(self, engine: RolloutEngine, other: RolloutEngine, with_kv: bool) -> None:
        engine.submit(REQUESTS)
        found = decode(engine, lambda: engine.load().generated_tokens >= 12)
        there = [r.sample_id for r in REQUESTS if engine.has_sample(r.sample_id)]
        there.sort(key=engine.is_waiting, reverse=True)  # before they begin
        moved = [hand_over(engine, other, name, with_kv) for name in there]
        found |= finish(engine)
        snapshots = [snapshot for snapshot in moved if snapshot is not None]
        assert any(snapshot.tokens for snapshot in snapshots) and not all(snapshot.tokens for snapshot in snapshots)
        assert any(snapshot.kv is not None for snapshot in snapshots) == with_kv
        assert not found.keys() & {snapshot.request.sample_id for snapshot in snapshots}
        assert_right(found | finish(other), REQUESTS)

    def test_stop_token_ends_the_sample_and_is_its_last(self, engine: RolloutEngine) -> None:
        free = GenerationRequest("free", "g", (1, 2, 3), seed=11, max_new_tokens=40)
        tokens = generate(engine, [free])["free"].tokens
        stop = tokens[12]
        stopped = generate(engine, [dataclasses.replace(free, sample_id="stopped", stop_tokens=(stop,))])["stopped"]
        assert stopped.tokens == tokens[: tokens.index(stop) + 1]
        assert stopped.finish_reason is FinishReason.STOP

    def test_limits_up_to_the_last_position(self, engine: RolloutEngine) -> None:
        prompt = tuple(range(20))
        requests = [
            GenerationRequest(f"{limit}", "g", prompt, seed=limit, max_new_tokens=limit)
            for limit in (1, 2, MAX_POSITIONS - len(prompt))
        ]
        results = generate(engine, requests)
        assert [len(results[r.sample_id].tokens) for r in requests] == [r.max_new_tokens for r in requests]
        assert_right(results, requests)

    # Samples come and go

    def test_abort_returns_progress_and_what_was_aborted_can_come_again(self, engine: RolloutEngine) -> None:
        engine.submit(REQUESTS)
        found = decode(engine, lambda: engine.load().generated_tokens >= 12)
        kept = next(request for request in REQUESTS if engine.has_sample(request.sample_id))
        others = [request for request in REQUESTS if request is not kept]
        ids = [request.sample_id for request in others]
        aborted = {result.sample_id: result for result in engine.abort([*ids, *ids, "unknown"])}
        assert engine.abort(ids) == []
        found |= finish(engine)
        assert found.keys() == {request.sample_id for request in REQUESTS} - aborted.keys()
        assert {result.finish_reason for result in aborted.values()} == {FinishReason.ABORTED}
        assert any(result.tokens for result in aborted.values())
        assert_right(found | aborted, REQUESTS, whole=False)
        assert_right(found | generate(engine, [one for one in others if one.sample_id in aborted]), REQUESTS)

    def test_progress_adds_up_and_goes_on_elsewhere(self, engine: RolloutEngine, other: RolloutEngine) -> None:
        """To and fro: what the driver knows of is not reported again."""
        (request,) = long_requests(1)
        snapshot, reported, logprobs = SampleSnapshot(request, [], [], []), list[int](), list[float]()
        for place in (engine, other, engine):
            place.import_sample(snapshot)
            gained = 0
            while gained < 3:
                assert place.poll(SHORTEST_POLL) == []
                for one in place.progress():
                    gained += len(one.tokens)
                    assert len(one.tokens) == len(one.logprobs) and one.versions == [1] * len(one.tokens)
                    reported, logprobs = reported + one.tokens, logprobs + one.logprobs
            snapshot = place.export_sample(request.sample_id)
            assert snapshot.reported == len(reported) and snapshot.tokens[: len(reported)] == reported
            assert snapshot.logprobs[: len(reported)] == logprobs
        assert_right(
            {"s0": GenerationResult("s0", reported, logprobs, reported, FinishReason.ABORTED)}, [request], whole=False
        )
        other.import_sample(dataclasses.replace(snapshot, kv=None))
        assert_right(finish(other), [request])

    def test_kv_can_be_read_right_after_the_first_token(self, engine: RolloutEngine) -> None:
        """Of several samples: in an engine that decodes all the time it is a matter of moments."""
        for request in long_requests(12):
            engine.submit([request])
            assert engine.committed_positions(request.sample_id) is None
            decode(engine, until=functools.partial(begun, engine, request.sample_id))
            settled = engine.committed_positions(request.sample_id)
            assert settled is not None and settled["target"] >= len(request.prompt_tokens)
            for part, last in settled.items():
                kv = engine.committed_kv(request.sample_id, part, 0, last)
                assert kv.shape == engine.kv_layout(last).parts[part] and bool(kv.any())
            engine.clear()

    def test_an_engine_knows_what_it_has(self, engine: RolloutEngine) -> None:
        (request,) = long_requests(1)
        assert not engine.has_sample("s0")
        engine.submit([request])
        assert engine.has_sample("s0") and engine.is_waiting("s0") and engine.request("s0") == request
        decode(engine, lambda: begun(engine, "s0"))
        assert engine.has_sample("s0")
        finish(engine)
        assert not engine.has_sample("s0") and not engine.is_waiting("s0")
        with pytest.raises(RunError, match="s0"):
            engine.export_sample("s0")

    def test_clear_forgets_everything(self, engine: RolloutEngine) -> None:
        short = dataclasses.replace(long_requests(1)[0], sample_id="short", max_new_tokens=1)
        engine.submit([short, *long_requests(3)])
        decode(engine, lambda: engine.load().generated_tokens >= 5)
        engine.clear()
        assert not busy(engine) and engine.poll(0.01) == [] and engine.progress() == []
        assert_right(generate(engine, long_requests(3)), long_requests(3))

    def test_load_and_stats_count(self, engine: RolloutEngine) -> None:
        slots = engine.load().slots
        requests = long_requests(slots + 2, most=40)
        engine.submit(requests)
        load = engine.load()
        assert (load.running, load.waiting, load.policy_version) == (0, slots + 2, 1)
        decode(engine, lambda: engine.load().running == slots)  # all slots are used at once
        load = engine.load()
        assert load.waiting == 2
        assert load.decode_steps <= load.generated_tokens < 40 * slots
        finish(engine)
        load, stats = engine.load(), engine.stats()
        assert stats["generated_tokens"] == load.generated_tokens == 40 * (slots + 2)
        assert stats["decode_steps"] == load.decode_steps > 0
        assert (load.running, load.waiting) == (0, 0)

    # Weights

    def test_each_token_records_its_version_and_waiting_samples_take_the_new_weights(
        self, engine: RolloutEngine
    ) -> None:
        early, late = long_requests(3)[:2], long_requests(3)[2]
        engine.submit(early)
        decode(engine, lambda: engine.load().generated_tokens >= 6)
        names = list(OTHER_WEIGHTS)
        engine.begin_update(7, infos())
        engine.submit([late])
        engine.update_weights([(name, 0, OTHER_WEIGHTS[name].flatten()) for name in names])
        assert engine.poll(0.01) == [] and engine.load().policy_version == 1
        engine.end_update(7)
        assert engine.load().policy_version == 7
        found = finish(engine)
        for request in early:
            result = found[request.sample_id]
            before = result.versions.count(1)
            assert result.versions == [1] * before + [7] * (60 - before) and 0 < before < 60
            assert result.tokens[:before] == reference(request).tokens[:before]
            assert result.tokens != reference(request).tokens
        assert found["s2"].versions == [7] * 60
        assert_right(found, [late], OTHER_JUDGE)

    @pytest.mark.parametrize(
        "spans", [[], [(0, 31)], [(1, 32)], [(0, 16), (17, 32)], [(0, 32), (0, 32)], [(0, 20), (8, 32)]]
    )
    def test_an_incomplete_update_names_the_tensor_and_nothing_is_decoded(
        self, engine: RolloutEngine, spans: list[tuple[int, int]]
    ) -> None:
        engine.submit(REQUESTS[:1])
        engine.begin_update(2, infos())
        norm = WEIGHTS["model.norm.weight"]
        engine.update_weights([(name, 0, t.flatten()) for name, t in WEIGHTS.items() if name != "model.norm.weight"])
        with pytest.raises(RunError, match=r"model\.norm\.weight"):
            engine.update_weights([("model.norm.weight", first, norm[first:last]) for first, last in spans])
            engine.end_update(2)
        assert engine.poll(0.01) == [] and engine.load().decode_steps == 0  # mixed weights: nothing is decoded
        send_weights(engine, version=3)
        assert_right(finish(engine), REQUESTS[:1])
        assert engine.load().policy_version == 3

    def test_update_refuses_overruns_other_tensors_and_other_versions(self, engine: RolloutEngine) -> None:
        for outside in (lambda: engine.update_weights([("model.norm.weight", 0, torch.zeros(32))]),
                        lambda: engine.end_update(2)):  # fmt: skip
            with pytest.raises(RunError, match="begin_update"):
                outside()
        engine.begin_update(2, infos()[:1])
        with pytest.raises(RunError, match=r"model\.norm\.weight, which was not announced"):
            engine.update_weights([("model.norm.weight", 0, torch.zeros(32))])
        with pytest.raises(RunError, match=r"elements 900 to 932 of model\.embed_tokens\.weight"):
            engine.update_weights([("model.embed_tokens.weight", 900, torch.zeros(32))])
        with pytest.raises(RunError, match="end weight update 3, but update 2"):
            engine.end_update(3)

    def test_update_refuses_what_is_not_finite(self, engine: RolloutEngine) -> None:
        engine.begin_update(2, infos()[:1])
        name, whole = infos()[0].name, WEIGHTS[infos()[0].name].flatten().clone()
        whole[7] = float("nan")
        with pytest.raises(RunError, match=r"NaN or infinity in model\.embed_tokens\.weight"):
            engine.update_weights([(name, 0, whole)])
            engine.end_update(2)

    def test_nothing_is_decoded_before_weights_have_come(self, engines: tuple[RolloutEngine, RolloutEngine]) -> None:
        fresh = engines[0]
        assert fresh.load().policy_version == -1 and fresh.poll(0) == []
        fresh.submit(REQUESTS[:2])
        with pytest.raises(RunError, match="no weights"):
            fresh.poll(0)
        send_weights(fresh, version=0)
        assert_right(finish(fresh), REQUESTS[:2])

    # What is refused

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
            ({"sample_id": "here"}, "already"),
            ({"sample_id": "good"}, "already"),
        ],
    )
    def test_bad_requests_are_refused_and_nothing_is_queued(
        self, engines: tuple[RolloutEngine, RolloutEngine], change: dict[str, Any], sentence: str
    ) -> None:
        engine = engines[0]
        good = GenerationRequest("good", "g", (1,), seed=0, max_new_tokens=2)
        engine.submit([dataclasses.replace(good, sample_id="here")])
        bad = dataclasses.replace(good, **({"sample_id": "bad"} | change))
        with pytest.raises(UserError, match=sentence):
            engine.submit([good, bad])
        if bad.sample_id != "good":
            with pytest.raises(UserError, match=sentence):
                engine.import_sample(SampleSnapshot(bad, [], [], []))
        assert not engine.has_sample("good") and engine.load().waiting == 1
        engine.submit([good])
        assert engine.has_sample("good") and engine.load().waiting == 2

    # What drives it

    @pytest.mark.parametrize("deaths", [{}, {2: True}, {3: False, 5: True}])
    def test_the_manager_drives_it(self, engine: RolloutEngine, other: RolloutEngine, deaths: dict[int, bool]) -> None:
        """Engines die; every sample comes back once."""
        pool, ledger = Pool([Driven(engine), Driven(other)], dict(deaths)), Ledger()
        prompts = {request.group_id: Prompt(int(request.group_id), "", "", (1,)) for request in REQUESTS}
        ledger.open([Sample(one.sample_id, 0, prompts[one.group_id], 0) for one in REQUESTS], Purpose.TRAIN)
        manager = RolloutManager(pool, pool.wait, revive=pool.revive, poll_seconds=0.0)
        assert_right(manager.generate(REQUESTS, ledger, "generate"), REQUESTS)
        assert pool.calls > max(deaths, default=0)
