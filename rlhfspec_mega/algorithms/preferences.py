"""Training of a reward model: the chosen response of a pair is to score higher than the rejected one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlhfspec_mega.data.examples import Example
from rlhfspec_mega.rl.experience import Experience, ending_values
from rlhfspec_mega.rl.objectives import SLOPE, linear_objective
from rlhfspec_mega.workers.model_group import ModelGroup


class Preferences:
    """Minimises -log sigmoid(chosen - rejected - margin), Bradley-Terry (InstructGPT, arXiv 2203.02155).

    The scores come from a pass of their own. Their derivatives then weigh the scores in the pass with gradients: so the
    two responses of a pair may lie in different micro-batches and on different ranks, and the gradient is exact.

    Args:
        margin: see supervised.margin (Llama 2, arXiv 2307.09288).
    """

    def __init__(self, margin: float) -> None:
        self._margin = margin

    def update(self, examples: Sequence[Example], model: ModelGroup) -> dict[str, float]:
        """One optimizer step; returns `reward_model/loss` and `/accuracy` from before it, and the actor's metrics."""
        experience = _experience(examples)
        differences = _differences(experience, model, "update")
        slopes = -2.0 / (
            1.0 + np.exp(differences - self._margin)
        )  # the loss is averaged over scores, of which a pair has two
        experience.columns[SLOPE] = np.concatenate([slopes, -slopes]).astype(np.float32)
        metrics = model.accumulate(experience, linear_objective, []) | model.step()
        del metrics["loss"]
        return _figures("reward_model", differences, self._margin) | {
            f"actor/{name}": value for name, value in metrics.items()
        }

    def evaluate(self, examples: Sequence[Example], model: ModelGroup) -> dict[str, float]:
        """`val/loss` and `val/accuracy` on held-out pairs."""
        return _figures("val", _differences(_experience(examples), model, "evaluate"), self._margin)


def _differences(experience: Experience, model: ModelGroup, phase: str) -> NDArray[np.float64]:
    """chosen - rejected of every pair."""
    chosen, rejected = model.values(experience, phase).astype(np.float64).reshape(2, -1)
    return chosen - rejected


def _experience(examples: Sequence[Example]) -> Experience:
    """The chosen responses, then the rejected ones, each with its prompt."""
    return ending_values([[*one.prompt, *one.responses[place]] for place in (0, 1) for one in examples])


def _figures(group: str, differences: NDArray[np.float64], margin: float) -> dict[str, float]:
    return {
        f"{group}/loss": float(np.logaddexp(0.0, margin - differences).mean()),
        f"{group}/accuracy": float((differences > 0).mean()),
    }
