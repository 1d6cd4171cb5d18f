"""An engine's worker that drafts: what it has learnt outlives it where it holds, and no lost update stops it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhfspec_mega import trainer
from rlhfspec_mega.config.schema.generation import RolloutConfig, SpeculationConfig
from rlhfspec_mega.draft.directory import write_draft
from rlhfspec_mega.rollout.protocol import SampleSnapshot
from rlhfspec_mega.rollout.torch_engine.profile import profile
from rlhfspec_mega.types import GenerationRequest, GenerationResult, TensorInfo, WeightTarget
from rlhfspec_mega.workers.torch_engine import TorchEngineWorker
from tests.near_tie import assert_same
from tests.unit.test_speculation import DRAFT, draft_weights, send_draft
from tests.unit.test_torch_engine import JUDGE, REQUESTS, SHAPE, WEIGHTS, alone, one_thread, send_weights

__all__ = ["alone", "one_thread"]
LIMITS = RolloutConfig(max_prompt_tokens=37, max_new_tokens=35, max_running_requests=4)


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("draft") / "draft"
    write_draft(path, DRAFT, draft_weights())
    return path


@pytest.fixture(autouse=True)
def any_algorithm():
    yield
    torch.use_deterministic_algorithms(False)


def make_worker(draft: Path, state: Any = None, limits: RolloutConfig = LIMITS, **given: Any) -> TorchEngineWorker:
    config = SpeculationConfig(policy="fixed", num_steps=2, num_draft_tokens=4)  # drafts in every step
    worker = TorchEngineWorker(
        SHAPE, limits, "float32", "cpu", draft=draft, drafting=config, drafting_state=state, **given
    )
    send_weights(worker.engine, WEIGHTS)
    send_draft(worker.engine, draft_weights())
    return worker


def decode(worker: TorchEngineWorker, new: Sequence[GenerationRequest] = REQUESTS) -> dict[str, GenerationResult]:
    """Until nothing is left, or it is clear that nothing goes on."""
    report = worker.advance([SampleSnapshot(request, [], [], []) for request in new], 0.0)
    results, calls = report.finished, 0
    while report.unfinished and calls < 3000:
        report = worker.advance([], 0.0)
        results, calls = results + report.finished, calls + 1
    return {result.sample_id: result for result in results}


@pytest.fixture(scope="module")
def learnt(draft) -> dict[str, Any]:
    """The state after all samples, as a file would give it back."""
    worker = make_worker(draft)
    decode(worker)
    worker.take_tally()  # the end of a rollout
    return json.loads(json.dumps(worker.drafting_state()))


def test_a_worker_measures_costs_once_and_gives_the_tokens_of_plain_decoding(alone, draft, monkeypatch):
    profiles = []
    monkeypatch.setattr(
        "rlhfspec_mega.workers.torch_engine.profile", lambda engine: profiles.append(profile(engine)) or profiles[-1]
    )
    worker = make_worker(draft)
    before = worker.drafting_state()
    assert_same(alone, decode(worker), REQUESTS, JUDGE)
    assert worker.take_tally().accepted > 0
    after = worker.drafting_state()
    assert not before["measured"] and after["measured"] and before["cost"] != after["cost"]
    decode(worker)
    assert len(profiles) == 1 and profiles[0], "these short limits leave room to measure"


@pytest.mark.parametrize("change", [None, "slots", "dtype", "draft", "unmeasured", "no key", "a list", "deterministic"])
def test_what_was_learnt_is_taken_up_only_where_it_holds(draft, tmp_path, learnt, change):
    given: dict[str, Any] = {"state": learnt}
    if change == "slots":
        given["limits"] = RolloutConfig(max_prompt_tokens=37, max_new_tokens=35, max_running_requests=5)
    elif change == "dtype":
        given["state"] = learnt | {"key": learnt["key"].replace("float32", "bfloat16")}
    elif change == "draft":
        given["state"] = learnt | {"key": learnt["key"].replace("ffn_size=48", "ffn_size=64")}
    elif change == "no key":
        given["state"] = {name: learnt[name] for name in ("cost", "acceptance")}
    elif change == "a list":
        given["state"] = [1, 2]
    elif change == "unmeasured":
        given["state"] = learnt | {"measured": False}
    elif change == "deterministic":
        given["deterministic"] = True
    found = make_worker(draft, **given).drafting_state()
    if change == "deterministic":
        assert found is None
    elif change in (None, "unmeasured"):
        assert json.loads(json.dumps(found)) == given["state"] and learnt["usual"] is not None
    else:
        assert not found["measured"] and found["usual"] is None and found["cost"] != learnt["cost"]


def test_an_update_of_the_draft_that_was_given_up_stops_nothing(alone, draft):
    """A silent engine drops out of a transfer; heard again, it is asked for samples with the update still open."""
    worker, weights = make_worker(draft), draft_weights(seed=2)
    finished = worker.advance([SampleSnapshot(request, [], [], []) for request in REQUESTS], 0.0).finished
    infos = [TensorInfo(name, tuple(tensor.shape), "float32") for name, tensor in weights.items()]
    worker.engine.begin_update(2, infos, WeightTarget.DRAFT)
    worker.engine.update_weights([(name, 0, tensor.flatten()) for name, tensor in list(weights.items())[:3]])
    worker.take_tally()
    found = {result.sample_id: result for result in finished} | decode(worker, [])
    assert_same(alone, found, REQUESTS, JUDGE)
    assert not worker.engine.drafting and worker.take_tally().verified == 0, "half of these weights are other ones"
    send_draft(worker.engine, weights, 2)
    assert_same(alone, decode(worker), REQUESTS, JUDGE)
    assert worker.take_tally().accepted > 0


def test_actor_weights_end_an_update_of_the_draft_that_was_given_up(draft):
    worker, weights = make_worker(draft), draft_weights(seed=2)
    worker.engine.begin_update(
        2, [TensorInfo(n, tuple(t.shape), "float32") for n, t in weights.items()], WeightTarget.DRAFT
    )
    send_weights(worker.engine, WEIGHTS, 2)
    assert not worker.engine.drafting


def test_a_full_disk_costs_what_was_learnt_and_not_the_run(monkeypatch):
    def fail() -> None:
        raise OSError(28, "No space left on device")

    notes: list[str] = []
    run: Any = SimpleNamespace(
        phases=SimpleNamespace(measure=lambda name: torch.no_grad()),
        config=SimpleNamespace(launcher=SimpleNamespace(call_timeout=1.0)),
        saver=SimpleNamespace(start=lambda *arguments: None, wait=lambda *arguments: None),
        console=SimpleNamespace(note=notes.append),
        system=SimpleNamespace(learners={}, save_learnt=fail),
        directory=Path(),
    )
    monkeypatch.setattr(trainer, "driver_state", lambda run: {})
    trainer.save(run, 1)
    assert len(notes) == 1 and "No space left on device" in notes[0]


def test_a_prompt_and_a_response_of_one_token_each(draft):
    worker = make_worker(draft, limits=RolloutConfig(max_prompt_tokens=1, max_new_tokens=1, max_running_requests=2))
    (result,) = decode(worker, [GenerationRequest("0", "0", (3,), 7, 1)]).values()
    assert len(result.tokens) == 1
