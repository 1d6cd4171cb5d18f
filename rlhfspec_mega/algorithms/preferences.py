"""Training of a reward model: the chosen response of a pair is to score higher than the rejected one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from rlhfspec_mega.data.examples import Example
from rlhfspec_mega.rl.experience import Experience, ending_values
from rlhfspec_mega.rl.objectives import preference_objective
from rlhfspec_mega.workers.model_group import ModelGroup


class Preferences:
    """Minimises -log sigmoid(chosen - rejected - margin), Bradley-Terry (InstructGPT, arXiv 2203.02155).

    Args:
        margin: see supervised.margin (Llama 2, arXiv 2307.09288).
    """

    def __init__(self, margin: float) -> None:
        self._margin = margin

    def update(self, examples: Sequence[Example], model: ModelGroup) -> dict[str, float]:
        """One optimizer step; returns `reward_model/loss` and `/accuracy` from before it, and the actor's metrics."""
        loss = partial(preference_objective, margin=self._margin)
        metrics = model.accumulate(_experience(examples), loss, ["accuracy"], together=2) | model.step()
        found = {f"reward_model/{name}": metrics.pop(name) for name in ("loss", "accuracy")}
        return found | {f"actor/{name}": value for name, value in metrics.items()}

    def evaluate(self, examples: Sequence[Example], model: ModelGroup) -> dict[str, float]:
        """`val/loss` and `val/accuracy` on held-out pairs."""
        chosen, rejected = model.values(_experience(examples), "evaluate").astype(np.float64).reshape(-1, 2).T
        differences = chosen - rejected
        return {
            "val/loss": float(np.logaddexp(0.0, self._margin - differences).mean()),
            "val/accuracy": float((differences > 0).mean()),
        }


def _experience(examples: Sequence[Example]) -> Experience:
    """Pair after pair, the chosen response before the rejected one, each with its prompt."""
    return ending_values([[*one.prompt, *response] for one in examples for response in one.responses])
