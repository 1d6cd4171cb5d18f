"""What an engine's worker gains by a reference: it scores finished samples on its own device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.rollout.fusion import ScoreReport, ScoringTask
from rlhfspec_mega.rollout.scoring import Scorer
from rlhfspec_mega.types import Span


@dataclass(frozen=True)
class ReferenceSettings:
    """The reference that engines score with.

    Attributes:
        path: Hugging Face directory of the model that the run started from, in this life or an earlier one.
        dtype: the actor's, e.g. "float32": the two are compared.
        temperature: that samples are drawn at.
        max_tokens: padded tokens of a batch, at most.
        logit_chunk: positions whose float32 logits exist at once.
    """

    path: Path
    dtype: str
    temperature: float
    max_tokens: int
    logit_chunk: int


class ReferenceScoring:
    """Mixed into an engine's worker; between `advance` calls it scores instead of decoding."""

    _scorer: Scorer | None = None
    _temperature: float

    def hold_reference(self, settings: ReferenceSettings, max_positions: int, device: str) -> None:
        """Score with this reference from now on; its weights are read when first needed.

        Args:
            max_positions: longest sequence in tokens.
        """
        self._scorer = Scorer(
            settings.path,
            max_positions=max_positions,
            dtype=getattr(torch, settings.dtype),
            device=device,
            max_tokens=settings.max_tokens,
            logit_chunk=settings.logit_chunk,
        )
        self._temperature = settings.temperature

    def score(self, tasks: Sequence[ScoringTask]) -> ScoreReport:
        """The reference's log-probs of these responses. Raises RunError on an engine without a reference."""
        if self._scorer is None:
            raise RunError("An engine was asked for the reference's log-probs before it was given a reference.")
        started = time.time()
        found = self._scorer.logprobs([(task.prompt_tokens, task.response_tokens) for task in tasks], self._temperature)
        amounts: dict[str, float | int | str] = {"samples": len(tasks), "tokens": sum(task.tokens for task in tasks)}
        span = Span("score", started, time.time() - started, amounts)
        return ScoreReport({task.sample_id: one for task, one in zip(tasks, found, strict=True)}, span)
