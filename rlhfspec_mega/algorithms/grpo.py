"""GRPO (DeepSeekMath, arXiv 2402.03300): a sample's reward minus its group's mean, over the standard deviation."""

from __future__ import annotations

from torch import Tensor

from rlhfspec_mega.algorithms.group_relative import GroupRelative
from rlhfspec_mega.rl.advantages import grpo


class GRPO(GroupRelative):
    """Group-relative advantages; without the division (algorithm.norm_adv_by_std=false) Dr. GRPO (arXiv 2503.20783)."""

    def advantages(self, rewards: Tensor) -> Tensor:
        """See advantages.grpo."""
        return grpo(rewards, self._config.norm_adv_by_std)
