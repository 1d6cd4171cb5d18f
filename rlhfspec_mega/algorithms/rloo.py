"""RLOO (arXiv 2402.14740): a sample's reward minus the mean reward of the other samples of its group."""

from __future__ import annotations

from torch import Tensor

from rlhfspec_mega.algorithms.group_relative import GroupRelative
from rlhfspec_mega.rl.advantages import rloo


class RLOO(GroupRelative):
    """Leave-one-out baseline."""

    def advantages(self, rewards: Tensor) -> Tensor:
        """See advantages.rloo."""
        return rloo(rewards)
