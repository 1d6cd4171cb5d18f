"""PPO from samples to what actor and critic are asked to learn."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from rlhfspec_mega.algorithms.choice import make_algorithm
from rlhfspec_mega.config.schema.training import AlgorithmConfig, CriticConfig
from rlhfspec_mega.rl.experience import Experience

GAE: dict[str, Any] = {"adv_estimator": "gae", "norm_adv_by_std": False, "kl_in": "reward", "whiten_advantages": False}


class Recorder:
    """In place of a model: what it was asked to learn from."""

    def __init__(self, divergence: float = 0.0) -> None:
        self.batches: list[Experience] = []
        self._divergence = divergence

    def accumulate(self, samples: Experience, loss: Any, metrics: Any) -> dict[str, float]:
        self.batches.append(samples)
        return {"loss": 1.0, "approx_kl": self._divergence}

    def step(self) -> dict[str, float]:
        return {"skipped_updates": 0.0}

    def values(self, samples: Experience, phase: str) -> np.ndarray:
        return np.arange(samples.response_offsets[-1], dtype=np.float32) / 10


def experience(lengths: list[int], rewards: list[float], truncated: int | None = None) -> Experience:
    made = Experience.of([[7]] * len(lengths), [[258] * length for length in lengths])  # end-of-text tokens only
    made.per_sample["rewards"] = np.array(rewards)
    made.per_sample["truncated"] = np.arange(len(lengths)) == truncated
    for name, value in (("old_logprobs", -1.0), ("reference_logprobs", -1.5), ("engine_logprobs", -1.0)):
        made.columns[name] = np.full(sum(lengths), value, np.float32)
    return made


def ppo(critic: CriticConfig | None = None, **options: Any) -> Any:
    return make_algorithm(AlgorithmConfig(**GAE | options), 2, 2, critic)


def advantages(algorithm: Any, made: Experience) -> tuple[Experience, dict[str, float]]:
    algorithm.add_values(made, Recorder())
    return made, algorithm.add_advantages(made, torch.Generator())


def test_the_reward_comes_with_the_last_token_and_the_penalty_with_each():
    """Also where every token is an end-of-text token, which some tokenizers pad with."""
    algorithm = ppo(kl_coef=0.2, kl_loss_type="k1", gae_lambda=1.0)
    assert algorithm.models == ("actor", "reference", "critic")
    made, metrics = advantages(algorithm, experience([3, 1], [1.0, -2.0]))
    returns = [0.7, 0.8, 0.9, -2.1]  # 0.2 x 0.5 off for each token
    assert made.columns["returns"] == pytest.approx(np.array(returns))
    assert made.columns["advantages"] == pytest.approx(np.array(returns) - np.array([0, 0.1, 0.2, 0.3]))
    assert metrics["actor/kl_coef"] == 0.2
    want = 1 - np.var(np.array(returns) - [0, 0.1, 0.2, 0.3]) / np.var(returns)
    assert metrics["critic/explained_variance"] == pytest.approx(want, rel=1e-5)


def test_whitening_takes_all_samples_and_leaves_out_masked_ones():
    made, _ = advantages(ppo(kl_coef=0.0, whiten_advantages=True, overlong="mask"), experience([2, 3, 2], [1, 2, 3], 1))
    found = made.columns["advantages"]
    counted = np.concatenate([found[:2], found[5:]])
    assert counted.mean() == pytest.approx(0, abs=1e-6) and counted.std() == pytest.approx(1, abs=1e-6)
    assert not found[2:5].any(), "a masked sample has no say"


def test_every_sample_is_learnt_from_once_in_each_epoch():
    algorithm = ppo(kl_coef=0.0, ppo_epochs=3)
    made, _ = advantages(algorithm, experience([1, 2, 3, 4, 5], [1, 2, 3, 4, 5]))
    actor, critic = Recorder(), Recorder()
    metrics = algorithm.update(made, {"actor": actor, "critic": critic}, 0, torch.Generator().manual_seed(1))
    assert metrics["actor/loss"] == metrics["critic/loss"] == 1.0
    for model in (actor, critic):
        lengths = [batch.response_lengths.tolist() for batch in model.batches]
        assert [len(batch) for batch in lengths] == [2, 2, 1] * 3
        epochs = [list(chain(*lengths[first : first + 3])) for first in (0, 3, 6)]
        assert epochs[0] == [1, 2, 3, 4, 5] and all(sorted(epoch) == epochs[0] for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1, "in another order"
        assert all((batch.columns["weights"] == 1).all() for batch in model.batches)


def test_the_critic_learns_alone_at_first_and_on_where_the_actor_stops():
    algorithm = ppo(CriticConfig(warmup_steps=2), kl_coef=0.0, early_stop_kl=0.1)
    made, _ = advantages(algorithm, experience([1, 2, 3, 4], [1, 2, 3, 4]))
    for step, diverges, updates in ((1, False, 0), (2, True, 1), (3, False, 2)):
        actor, critic = Recorder(0.2 if diverges else 0.05), Recorder()
        metrics = algorithm.update(made, {"actor": actor, "critic": critic}, step, torch.Generator())
        assert (len(actor.batches), len(critic.batches)) == (updates, 2)
        assert ("actor/loss" in metrics) == (updates > 0)


def test_shuffled_advantages_are_the_same_ones_elsewhere():
    rewards = [float(number) for number in range(16)]
    plain, _ = advantages(ppo(kl_coef=0.0), experience([4] * 16, rewards))
    shuffled, _ = advantages(ppo(kl_coef=0.0, shuffle_advantages=True), experience([4] * 16, rewards))
    one, other = plain.columns["advantages"], shuffled.columns["advantages"]
    assert np.array_equal(np.sort(one), np.sort(other)) and (one == other).mean() < 0.3
    assert np.array_equal(plain.columns["returns"], shuffled.columns["returns"]), "the critic still learns"


def test_the_adapted_weight_is_part_of_a_checkpoint():
    options = {"kl_coef": 0.1, "target_kl": 0.5, "kl_horizon": 10, "kl_loss_type": "k1"}
    algorithm, resumed = ppo(**options), ppo(**options)
    _, first = advantages(algorithm, experience([3, 3], [0, 0]))
    _, second = advantages(algorithm, experience([3, 3], [0, 0]))
    assert first["actor/kl_coef"] == 0.1
    assert second["actor/kl_coef"] == pytest.approx(0.1 * 1.04), (
        "1.5 nats are three times the target: 0.2 x 2 / 10 more"
    )
    resumed.load_state_dict(algorithm.state_dict())
    assert resumed.state_dict() == algorithm.state_dict() != ppo(**options).state_dict()
