"""GRPO (DeepSeekMath, arXiv 2402.03300): a sample's reward against its group's mean, over its standard deviation."""

from __future__ import annotations

from torch import Tensor

from rlhfspec_mega.algorithm.advantages import grpo
from rlhfspec_mega.algorithms.policy_gradient import PolicyGradient


class GRPO(PolicyGradient):
    """Without the division (algorithm.norm_adv_by_std=false) it is Dr. GRPO (arXiv 2503.20783)."""

    def advantages(self, rewards: Tensor) -> Tensor:
        """See advantages.grpo."""
        return grpo(rewards, self._config.norm_adv_by_std)
