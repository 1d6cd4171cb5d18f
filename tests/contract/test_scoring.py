"""The reference on a generation device against the one on Megatron's ranks, beside an actor that has learnt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhfspec_mega.config.schema import ActorConfig, OptimizerConfig
from rlhfspec_mega.rollout.scoring import Scorer
from tests.contract.test_megatron_parity import TEMPERATURE, make_batches, make_models, make_sequences
from tests.megatron_probe import start_probes

CONFIG = ActorConfig(tensor_parallel=1, optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    cluster, group = start_probes(tmp_path_factory.mktemp("probe"), 1)
    yield group
    cluster.close()


def furthest(some: list[list[float]], others: list[list[float]]) -> float:
    pairs = zip(some, others, strict=True)
    return max(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("architecture", ["llama_tied", "llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("max_tokens", [24, 1000])
def test_agrees_with_the_frozen_reference(architecture: str, max_tokens: int, models: dict, probe: Any) -> None:
    sequences = make_sequences()
    batches = make_batches(sequences)

    def on_megatron() -> list[list[float]]:
        (found,) = probe.call("call", "logprobs", batches, phase="logprobs")
        lengths = [len(one.tokens) - one.prompt_length for one in sequences]
        return [part.tolist() for part in found[0].split(lengths)]

    probe.call("build", CONFIG, models[architecture], TEMPERATURE, phase="build")
    frozen = on_megatron()
    probe.call("update", [batches], phase="update")
    actor = on_megatron()

    scorer = Scorer(
        models[architecture],
        max_positions=64,
        dtype=torch.float32,
        device="cpu",
        max_tokens=max_tokens,
        logit_chunk=16,
    )
    split = [(one.tokens[: one.prompt_length], one.tokens[one.prompt_length :]) for one in sequences]
    scored = scorer.logprobs(split, TEMPERATURE)
    assert furthest(scored, frozen) < 1e-4
    assert furthest(scored, actor) > 1e-2, "the actor has moved away"
