"""A frozen model in replicas on generation devices: real processes against a plain transformer, whoever dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rlhfspec_mega.cluster.local import LocalCluster
from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.config.sizes import derive_sizes
from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.models.hf_config import read_shape
from rlhfspec_mega.models.hf_directory import WEIGHTS
from rlhfspec_mega.planning.placement import REFERENCE, REWARD
from rlhfspec_mega.rollout.scoring import Scoring
from rlhfspec_mega.system.scorers import Scorers
from rlhfspec_mega.system.setup import Setup
from rlhfspec_mega.types import FinishReason, GenerationRequest, GenerationResult
from tests.contract.test_megatron_parity import SIZES, make_models
from tests.ledgers import finished_ledger
from tests.replicas import read_transformer, response_logprobs

TEMPERATURE = 0.7
Given = tuple[GenerationRequest, GenerationResult]


class Beside:
    """The reference as a run has it, without the rest of the run. A context manager."""

    def __init__(
        self, directory: Path, run_dir: Path, tensor: int, max_restarts: int = 1, options: Sequence[str] = ()
    ) -> None:
        placement = f"placement.reference_tensor_parallel={tensor}"
        sizes = ("actor.logprob_chunk=16", "trainer.max_tokens_per_microbatch=24", "actor.tensor_parallel=1")
        config = load_config([placement, f"rollout.temperature={TEMPERATURE}", *sizes, *options])
        shape = read_shape(directory)
        setup = Setup(config, derive_sizes(config, shape), shape, run_dir, 1, reference=directory)
        limits: dict[str, Any] = {"call_timeout": 60.0, "start_timeout": 180.0, "heartbeat_timeout": 60.0}
        self.cluster = LocalCluster(
            run_dir / "logs", threads=1, use_gpus=setup.device == "cuda", max_restarts=max_restarts, **limits
        )
        self.scorers = Scorers(setup, self.cluster)
        self.cluster.wait_started()

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.close()
        self.scorers.close()

    def kill(self, rank: int) -> None:
        os.kill(self.cluster.process("reference", rank)._process.pid(), signal.SIGKILL)  # type: ignore[attr-defined]

    def scoring_of(self, given: Sequence[Given], models: Sequence[str] = (REFERENCE,)) -> Scoring:
        """Of samples that have finished, none of which has been added."""
        ledger = finished_ledger([request.sample_id for request, _ in given])
        return self.scorers.new_scoring(ledger, models, lambda prompt, response: (*prompt, *response))

    def finish(self, scoring: Scoring) -> None:
        while not scoring.done:
            scoring.start_or_revive()
            for call in self.cluster.wait(scoring.calls(), "reference", first=True, check=False):
                scoring.handle_answer(call)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


def samples(count: int = 9) -> list[Given]:
    found = []
    for number in range(count):
        request = GenerationRequest(f"{number}", "g", tuple(range(1, 2 + number % 5)), 0, max_new_tokens=30)
        tokens = [1 + (7 * position + number) % 31 for position in range(1 + 2 * number)]
        found.append((request, GenerationResult(f"{number}", tokens, [], [], FinishReason.STOP)))
    return found


def is_the_transformers(scoring: Scoring, given: Sequence[Given], path: Path) -> bool:
    model, results = read_transformer(path), scoring.results
    assert results.keys() == {request.sample_id for request, _ in given}
    alone = (response_logprobs(model, one.prompt_tokens, result.tokens, TEMPERATURE) for one, result in given)
    return all(np.abs(results[one.sample_id] - x).max() < 1e-4 for (one, _), x in zip(given, alone, strict=True))


@pytest.mark.parametrize(("architecture", "tensor"), [("llama_tied", 1), ("qwen2", 2), ("qwen3", 2)])
def test_scores_are_a_plain_transformers(architecture: str, tensor: int, models: dict, tmp_path: Path) -> None:
    given = samples()
    with Beside(models[architecture], tmp_path, tensor) as beside:
        scoring = beside.scoring_of(given)
        for one in given:
            scoring.add(*one)
        scoring.start(busy=[0])  # the other engine's device is free: of no use to a replica that needs both
        assert len(scoring.calls()) == (1 if tensor == 1 else 0)
        beside.finish(scoring)
        assert is_the_transformers(scoring, given, models[architecture])
        assert scoring.seconds_per_token > 0


@pytest.mark.parametrize("kl_coef", [0.1, 0.0])
def test_a_reward_model_scores_beside_the_reference_or_alone(kl_coef: float, models: dict, tmp_path: Path) -> None:
    path, given = make_reward_model(tmp_path / "classifier"), samples()
    options = (f"reward.model.path={path}", f"algorithm.kl_coef={kl_coef}")
    with Beside(models["qwen2"], tmp_path, 2, options=options) as beside:
        assert beside.scorers.models == ([REFERENCE, REWARD] if kl_coef else [REWARD])
        for asked in {(REWARD,), tuple(beside.scorers.models)}:
            scoring = beside.scoring_of(given, asked)
            for one in given:
                scoring.add(*one)
            beside.finish(scoring)
            if REFERENCE in asked:
                assert is_the_transformers(scoring, given, models["qwen2"])
            else:
                assert scoring.results == {}
            expected = {one.sample_id: classifier_score(path, [*one.prompt_tokens, *x.tokens]) for one, x in given}
            assert scoring.rewards == pytest.approx(expected, abs=1e-4)


def make_reward_model(directory: Path) -> Path:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SIZES, num_labels=1, pad_token_id=0, eos_token_id=0)
    transformers.LlamaForSequenceClassification(config).save_pretrained(directory)
    return directory


def classifier_score(path: Path, tokens: list[int]) -> float:
    """Of one sample alone; the last token is not the one that pads."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path)
    return float(model(torch.tensor([tokens])).logits)


def test_a_replica_is_started_anew_as_a_whole(models: dict, tmp_path: Path) -> None:
    """While it scores, and between two batches."""
    given = samples()
    with Beside(models["llama"], tmp_path, 2) as beside:
        scoring = beside.scoring_of(given)
        for one in given[:4]:
            scoring.add(*one)
        scoring.start_or_revive()
        beside.kill(1)
        beside.finish(scoring)
        assert [beside.cluster.launches["reference", rank] for rank in (0, 1)] == [2, 2]
        beside.cluster.progressed()
        beside.kill(0)
        for one in given[4:]:
            scoring.add(*one)
        beside.finish(scoring)
        assert [beside.cluster.launches["reference", rank] for rank in (0, 1)] == [3, 3]
        assert is_the_transformers(scoring, given, models["llama"])


def test_without_a_replica_left_a_sentence_says_so(models: dict, tmp_path: Path) -> None:
    with Beside(models["llama"], tmp_path, 2, max_restarts=0) as beside:
        scoring = beside.scoring_of(samples(1))
        scoring.add(*samples(1)[0])
        beside.kill(1)
        with pytest.raises(RunError, match=r"No replica of the reference is left"):
            beside.finish(scoring)


def test_weights_that_are_missing_are_named(models: dict, tmp_path: Path) -> None:
    """They are read at first use."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_bytes((models["llama"] / "config.json").read_bytes())
    with Beside(directory, tmp_path, 1) as beside:
        scoring = beside.scoring_of(samples(1))
        scoring.add(*samples(1)[0])
        with pytest.raises(UserError, match=WEIGHTS):
            beside.finish(scoring)


def test_too_long_a_sample_is_a_batch_of_its_own(models: dict, tmp_path: Path) -> None:
    request, result = samples(1)[0]
    long = replace(result, tokens=[3] * 40)
    with Beside(models["llama"], tmp_path, 1) as beside:
        scoring = beside.scoring_of([(request, long)])
        scoring.add(request, long)
        beside.finish(scoring)
        assert is_the_transformers(scoring, [(request, long)], models["llama"])
