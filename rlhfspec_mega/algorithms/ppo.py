"""PPO with a critic (arXiv 1707.06347; for language models arXiv 2203.02155): advantages by GAE, values that learn."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from rlhfspec_mega.algorithms.policy_gradient import PolicyGradient, add_old, averaged
from rlhfspec_mega.config.schema.training import AlgorithmConfig, CriticConfig
from rlhfspec_mega.planning.placement import ACTOR, CRITIC
from rlhfspec_mega.rl.advantages import shaped_rewards, shuffled
from rlhfspec_mega.rl.experience import Experience
from rlhfspec_mega.rl.gae import (
    Doubles,
    advantages_and_returns,
    discounted_sums,
    explained_variance,
    length_adaptive_lambda,
    whitened,
)
from rlhfspec_mega.rl.kl_controller import KlController
from rlhfspec_mega.rl.losses import kl_estimate
from rlhfspec_mega.rl.microbatch import Objective, TokenLoss
from rlhfspec_mega.rl.objectives import VALUE_METRICS, value_objective
from rlhfspec_mega.rl.shaping import RewardShaping
from rlhfspec_mega.workers.fused_group import FusedGroup
from rlhfspec_mega.workers.model_group import ModelGroup


class PPO(PolicyGradient):
    """A critic's values make an advantage of every token; the reward comes with the last one.

    For the arguments see PolicyGradient.
    """

    def __init__(
        self,
        config: AlgorithmConfig,
        members: int,
        samples_per_update: int,
        loss: TokenLoss | None = None,
        shaping: RewardShaping | None = None,
        *,
        critic: CriticConfig,
    ) -> None:
        super().__init__(config, members, samples_per_update, loss, shaping)
        self._critic = critic
        self._value_loss = partial(value_objective, clip=critic.value_clip)
        self._kl = KlController(config.kl_coef, config.target_kl, config.kl_horizon)

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models that the algorithm needs."""
        return (*super().models, CRITIC)

    def add_values(self, experience: Experience, critic: ModelGroup) -> None:
        """Compute and add the critic's values before this step's updates."""
        experience.columns["values"] = critic.values(experience, "values")

    def add_advantages(self, experience: Experience, generator: torch.Generator) -> dict[str, float]:
        """Compute and add advantages, and the returns that the critic learns; everything in float64.

        The policy's lambda and the critic's differ (VAPO, arXiv 2504.05118). Advantages are whitened over the tokens
        in the loss of all samples of the step, whatever ranks train them.

        Returns `critic/explained_variance`, of undiscounted returns by the values, and means of values and returns.
        """
        config, offsets = self._config, experience.response_offsets
        values = experience.columns["values"].astype(np.float64)
        rewards, metrics = self._token_rewards(experience)
        lambda_of_policy: Any = config.gae_lambda
        if config.gae_lambda_alpha is not None:
            lambda_of_policy = length_adaptive_lambda(experience.response_lengths, config.gae_lambda_alpha)
        found, _ = advantages_and_returns(rewards, values, offsets, config.gamma, lambda_of_policy)
        _, returns = advantages_and_returns(rewards, values, offsets, config.gamma, self._critic.gae_lambda)
        learns = self._learning(experience).numpy()
        counted = np.repeat(learns, experience.response_lengths)
        if config.whiten_advantages:
            found = whitened(found, counted)
        if config.shuffle_advantages:
            found = shuffled(torch.from_numpy(found), generator).numpy()
        experience.columns |= {"advantages": found.astype(np.float32), "returns": returns.astype(np.float32)}
        undiscounted = discounted_sums(rewards, offsets, 1.0)
        known = np.repeat(~np.isnan(experience.per_sample["rewards"]), experience.response_lengths)
        return metrics | {
            "critic/explained_variance": explained_variance(undiscounted[known], values[known]),
            "critic/value_mean": float(values.mean()),
            "critic/return_mean": float(returns[known].mean()) if known.any() else 0.0,
        }

    def update(
        self,
        experience: Experience,
        models: Mapping[str, ModelGroup],
        step: int,
        generator: torch.Generator,
        fused: FusedGroup | None = None,
    ) -> dict[str, float]:
        """Update actor and critic with every mini-batch, in one pass where that is faster; see PolicyGradient.update.

        In the first `critic.warmup_steps` steps only the critic learns.
        """
        of_actor: list[dict[str, float]] = []
        of_critic: list[dict[str, float]] = []
        differences: dict[str, float] = {}
        passes: list[float] = []
        for batch in self._mini_batches(experience, generator):
            actor_learns = step >= self._critic.warmup_steps and not self._diverged(of_actor)
            both = self._update_both(batch, experience, models, fused) if fused and actor_learns else None
            passes.append(float(both is not None))
            if both is not None:
                of_actor.append(both[0])
                of_critic.append(both[1])
                differences = differences | both[2]
                continue
            if actor_learns:
                found, differences = self._update_actor(batch, experience, models[ACTOR])
                of_actor.append(found)
            critic = models[CRITIC]
            of_critic.append(critic.accumulate(batch, self._value_loss, VALUE_METRICS) | critic.step())
        share = {"perf/fused_updates": sum(passes) / len(passes)} if fused else {}
        return averaged(ACTOR, of_actor) | averaged(CRITIC, of_critic) | differences | share

    def _update_both(
        self, batch: Experience, experience: Experience, models: Mapping[str, ModelGroup], fused: FusedGroup
    ) -> tuple[dict[str, float], dict[str, float], dict[str, float]] | None:
        """One pass for actor and critic (RLHFuse, arXiv 2409.13221): the actor's metrics, the critic's, and those of
        `add_old_logprobs` if that was left out; None if the planner finds that it would be no faster."""
        no_logprobs = "old_logprobs" not in experience.columns
        objectives = {
            ACTOR: Objective(self._loss, self._metrics, keep_columns=no_logprobs),
            CRITIC: Objective(self._value_loss, VALUE_METRICS),
        }
        found = fused.accumulate(batch, objectives)
        if found is None:
            return None
        (of_actor, column, entropy), (of_critic, _, _) = found[ACTOR], found[CRITIC]
        differences = add_old(experience, column, entropy) if no_logprobs and column is not None else {}
        return of_actor | models[ACTOR].step(), of_critic | models[CRITIC].step(), differences

    def update_gives_logprobs(self, experience: Experience, step: int) -> bool:
        """As PolicyGradient.update_gives_logprobs; not while only the critic learns."""
        return step >= self._critic.warmup_steps and super().update_gives_logprobs(experience, step)

    def state_dict(self) -> dict[str, Any]:
        """The weight of the KL penalty, and the state of the rewards' shaping."""
        return super().state_dict() | {"kl_weight": self._kl.weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        super().load_state_dict(state)
        self._kl.weight = float(state["kl_weight"])

    def _token_rewards(self, experience: Experience) -> tuple[Doubles, dict[str, float]]:
        """The reward of every token, [response tokens]: a sample's score at its last one, minus any KL penalty."""
        config, offsets = self._config, experience.response_offsets
        given, truncated = (torch.from_numpy(experience.per_sample[name]) for name in ("rewards", "truncated"))
        scores = shaped_rewards(given, truncated, None, config).nan_to_num(0.0).numpy()  # NaN: not in the loss
        rewards, metrics = np.zeros(int(offsets[-1])), {}
        if config.kl_in == "reward" and config.kl_coef > 0:
            policy, reference = (
                torch.from_numpy(experience.columns[name]).double() for name in ("old_logprobs", "reference_logprobs")
            )
            divergence = kl_estimate(policy, reference, config.kl_loss_type).numpy()
            rewards -= self._kl.weight * divergence
            metrics = {"actor/kl_coef": self._kl.weight}
            self._kl.observe(float(experience.summed(divergence).mean()), len(experience))
        rewards[offsets[1:] - 1] += scores  # a response has at least one token
        return rewards, metrics
