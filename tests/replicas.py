"""Replicas of a frozen model in this process: a plain transformer in place of Megatron, which it is compared with in
tests/contract/test_scoring.py."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.models.hf_config import read_shape
from rlhfspec_mega.models.hf_directory import HfWeights
from rlhfspec_mega.models.transformer import Transformer, sequence_logprobs
from rlhfspec_mega.rollout.scoring import ScoreReport, ScoringTask
from rlhfspec_mega.types import Span
from tests.engine_pool import Answered


def read_transformer(directory: Path) -> Transformer:
    """The model of a directory, in float32 on the CPU."""
    weights = HfWeights(directory)
    shape = read_shape(directory)
    model = Transformer(shape, max_positions=shape.max_positions, dtype=torch.float32, device="cpu")
    model.load({name: weights.get(name) for name in weights.names()})
    return model


def response_logprobs(
    model: Transformer, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """Of one sample alone."""
    rows = sequence_logprobs(model, torch.tensor([[*prompt, *response]]), temperature=temperature)
    return rows[0, len(prompt) - 1 :].tolist()


class TransformerReplicas:
    """Implements rollout.scoring.Replicas.

    Args:
        engines: by replica, the engines on its devices.
    """

    devices = 1

    def __init__(self, directory: Path, engines: Mapping[int, Collection[int]]) -> None:
        self._model, self._engines = read_transformer(directory), engines

    def serving(self) -> list[int]:
        return list(self._engines)

    def engines(self, replica: int) -> Collection[int]:
        return self._engines[replica]

    def start(self, replica: int, tasks: Sequence[ScoringTask], models: Sequence[str]) -> list[Answered]:
        begun = time.time()
        found = [response_logprobs(self._model, task.prompt_tokens, task.response_tokens) for task in tasks]
        return [Answered(replica, (found, Span("score", begun, time.time() - begun, {"samples": len(tasks)})))]

    def lost(self, calls: Sequence[Answered]) -> bool:
        return any(call.dead for call in calls)

    def report(
        self, replica: int, tasks: Sequence[ScoringTask], models: Sequence[str], answers: Sequence[tuple]
    ) -> ScoreReport:
        ((found, span),) = answers
        pairs = zip(tasks, found, strict=True)
        return ScoreReport(replica, {task.sample_id: np.array(one, np.float32) for task, one in pairs}, span)

    def revive(self) -> None:
        raise RunError("no replica is left")
