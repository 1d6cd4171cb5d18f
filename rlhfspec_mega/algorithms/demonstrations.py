"""Supervised fine-tuning (SFT): the model learns to give the answers of the data."""

from __future__ import annotations

from collections.abc import Sequence

from rlhfspec_mega.data.examples import Example
from rlhfspec_mega.rl.experience import Experience
from rlhfspec_mega.rl.objectives import supervised_objective
from rlhfspec_mega.workers.model_group import ModelGroup


class Demonstrations:
    """One optimizer step, or an evaluation, at a time."""

    def update(self, examples: Sequence[Example], model: ModelGroup) -> dict[str, float]:
        """One optimizer step; returns `sft/loss`, the negative log-likelihood per answer token, and the actor's."""
        metrics = model.accumulate(_experience(examples), supervised_objective, []) | model.step()
        return {"sft/loss": metrics.pop("loss"), **{f"actor/{name}": value for name, value in metrics.items()}}

    def evaluate(self, examples: Sequence[Example], model: ModelGroup) -> dict[str, float]:
        """`val/loss`, the mean negative log-likelihood per token of held-out answers."""
        logprobs, _ = model.logprobs(_experience(examples), "evaluate")
        return {"val/loss": -float(logprobs.mean(dtype="float64"))}


def _experience(examples: Sequence[Example]) -> Experience:
    return Experience.of([one.prompt for one in examples], [one.responses[0] for one in examples])
