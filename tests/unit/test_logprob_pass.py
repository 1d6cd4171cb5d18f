"""Steps whose only update gives the log-probs that would else take a pass of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rlhfspec_mega.algorithms.choice import make_algorithm
from rlhfspec_mega.config.schema.training import AlgorithmConfig, CriticConfig
from rlhfspec_mega.rl.experience import Experience
from rlhfspec_mega.rl.microbatch import Shard
from rlhfspec_mega.rl.objectives import policy_objective


class Actor:
    """In place of the actor: its log-probs are -2."""

    def accumulate_with_logprobs(
        self, samples: Experience, loss: Any, metrics: Any
    ) -> tuple[dict[str, float], np.ndarray, float]:
        return {"loss": 1.0, "approx_kl": 0.0}, np.full(int(samples.response_offsets[-1]), -2.0, np.float32), 0.75

    def step(self) -> dict[str, float]:
        return {"skipped_updates": 0.0}


def experience() -> Experience:
    made = Experience.of([[7], [7, 8]], [[1, 2, 3], [4]])
    made.per_sample |= {"rewards": np.array([1.0, 0.0]), "truncated": np.zeros(2, np.bool_)}
    made.columns["engine_logprobs"] = np.array([-2.0, -2.5, -2.0, -2.0], np.float32)
    return made


@pytest.mark.parametrize(
    ("options", "samples_per_update", "given"),
    [
        ({}, 2, True),
        ({}, 1, False),
        ({"ppo_epochs": 2}, 2, False),
        ({"kl_in": "reward"}, 2, False),
        ({"kl_in": "reward", "kl_coef": 0.0}, 2, True),
        ({"loss": "tests.e2e.rewards.evenness"}, 2, False),
    ],
)
def test_one_update_on_policy_needs_no_other_pass(options: dict, samples_per_update: int, given: bool) -> None:
    algorithm = make_algorithm(AlgorithmConfig(**options), 2, samples_per_update)
    assert algorithm.update_gives_logprobs(experience(), 0) is given


def test_not_while_only_the_critic_learns() -> None:
    config = AlgorithmConfig(adv_estimator="gae", norm_adv_by_std=False, kl_coef=0.0)
    algorithm = make_algorithm(config, 2, 2, CriticConfig(warmup_steps=3))
    assert [algorithm.update_gives_logprobs(experience(), step) for step in (2, 3)] == [False, True]


def test_the_update_adds_what_the_pass_would() -> None:
    algorithm, made, generator = make_algorithm(AlgorithmConfig(kl_coef=0.0), 2, 2), experience(), torch.Generator()
    algorithm.add_advantages(made, generator)
    metrics = algorithm.update(made, {"actor": Actor()}, 0, generator)  # type: ignore[dict-item]
    assert made.columns["old_logprobs"].tolist() == [-2.0] * 4
    assert metrics["actor/old_entropy"] == 0.75
    assert metrics["rollout/logprob_diff_mean"] == 0.125 and metrics["rollout/logprob_diff_max"] == 0.5


def test_the_gradient_is_the_one_with_the_log_probs_given() -> None:
    made, config = experience(), AlgorithmConfig(tis_clip=1.3, kl_coef=0.0)
    made.columns["advantages"] = made.spread([1.0, -1.0])
    found = []
    for given in (False, True):
        logprobs = torch.tensor([[-0.5, -1.0, -2.0, -1.5, -0.1]], requires_grad=True)
        if given:
            made.columns["old_logprobs"] = made.joined([[-0.5, -1.0, -2.0], [-0.1]])
        (batch,) = Shard.cut(made, [[0, 1]], packed=True).batches()
        losses, _ = policy_objective(logprobs, torch.zeros_like(logprobs), batch, config=config)
        (losses * batch.weights).sum().backward()
        found.append(logprobs.grad)
    assert torch.equal(*found) and found[0].abs().sum() > 0
