"""The part that GRPO and RLOO share: advantages from the rewards of a sample's group, without a critic."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor

from rlhfspec_mega.algorithms.policy_gradient import PolicyGradient
from rlhfspec_mega.errors import RunError
from rlhfspec_mega.rl.advantages import shaped_rewards, shuffled
from rlhfspec_mega.rl.experience import Experience
from rlhfspec_mega.rl.losses import kl_estimate


class GroupRelative(PolicyGradient):
    """An algorithm without a critic: advantages follow from the rewards of a sample's group."""

    @abstractmethod
    def advantages(self, rewards: Tensor) -> Tensor:
        """Advantages of shaped float64 rewards [prompts, members].

        The same shape, or flat with one per response token.
        """

    def add_advantages(self, experience: Experience, generator: torch.Generator) -> dict[str, float]:
        """Compute and add advantages.

        Args:
            generator: for the shuffle control.

        Raises RunError for advantages that are neither one per sample nor one per response token.
        """
        config, columns = self._config, experience.columns
        rewards, truncated = (
            torch.from_numpy(experience.per_sample[name]).view(-1, self._members) for name in ("rewards", "truncated")
        )
        kl = None
        if config.kl_in == "reward" and config.kl_coef > 0:
            policy, reference = (
                torch.from_numpy(columns[name]).double() for name in ("old_logprobs", "reference_logprobs")
            )
            summed = experience.summed(kl_estimate(policy, reference, config.kl_loss_type).numpy())
            kl = torch.from_numpy(summed).view(-1, self._members)
        found = self.advantages(shaped_rewards(rewards, truncated, kl, config))
        if config.shuffle_advantages:
            found = shuffled(found, generator)
        flat = found.flatten().numpy()
        tokens = int(experience.response_offsets[-1])
        if len(flat) not in (len(experience), tokens):
            raise RunError(
                f"algorithm.adv_estimator={config.adv_estimator} gave {len(flat)} advantages for "
                f"{len(experience)} samples of {tokens} response tokens: give one for each sample or each token."
            )
        columns["advantages"] = experience.spread(flat) if len(flat) == len(experience) else flat.astype(np.float32)
        return {}
