"""Predicts the seconds of forwards and backwards from their tokens, and learns from what they took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlhfspec_mega.planning.pipeline.problem import Doubles

_DECAY = 0.95  # weight of what was known when a pass is learnt: some twenty passes count
_NOMINAL_SPEED = 1e12  # parameters times tokens per second of a forward, until something is measured; only ratios count


class TaskCosts:
    """Seconds as a line over tokens, of each model, stage and kind of task.

    Args:
        parameters: of each model, those of each stage that take part in matrix products.
        fixed: never learn, so that plans do not depend on the clock (trainer.deterministic).
    """

    def __init__(self, parameters: Mapping[str, Sequence[float]], fixed: bool) -> None:
        self._parameters, self._fixed = parameters, fixed
        # Of (model, stage, backward): sums of weights, tokens, squared tokens, seconds, and tokens times seconds.
        self._sums: dict[tuple[str, int, bool], Doubles] = {}

    def seconds(self, model: str, backward: bool, tokens: Doubles) -> Doubles:
        """[stages, micro-batches] of a model whose micro-batches have so many tokens [micro-batches]."""
        stages = range(len(self._parameters[model]))
        return np.stack([self._line(model, stage, backward, tokens) for stage in stages])

    def learn(self, model: str, stage: int, backward: bool, tokens: Doubles, seconds: Doubles) -> None:
        """Learn from the tasks of one pass."""
        if self._fixed or not len(tokens):
            return
        key = (model, stage, backward)
        ones = np.ones_like(tokens)
        new = np.array([part.sum() for part in (ones, tokens, tokens**2, seconds, tokens * seconds)])
        self._sums[key] = new + (_DECAY * self._sums[key] if key in self._sums else 0.0)

    def _line(self, model: str, stage: int, backward: bool, tokens: Doubles) -> Doubles:
        sums = self._sums.get((model, stage, backward))
        if sums is None:
            return tokens * self._parameters[model][stage] * (2 if backward else 1) / _NOMINAL_SPEED
        count, of_tokens, squares, of_seconds, products = sums
        spread = count * squares - of_tokens**2
        slope = (count * products - of_tokens * of_seconds) / spread if spread > 1e-9 * count * squares else 0.0
        slope = min(max(slope, 0.0), of_seconds / of_tokens)  # neither part of the line may be negative
        return (of_seconds - slope * of_tokens) / count + slope * tokens
