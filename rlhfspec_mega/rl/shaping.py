"""Rewards as updates use them: normalized, clipped, less a penalty for length. Samples without a reward have NaN."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhfspec_mega.config.schema.reward import RewardConfig

Doubles = NDArray[np.float64]
_LEAST_DEVIATION = 1e-6  # rewards that differ less count as equal


class RewardShaping:
    """Shapes the rewards of one step after the other.

    A missing-EOS penalty is algorithm.overlong=penalize, a KL penalty algorithm.kl_in=reward.

    Args:
        members: samples of each prompt, a group.
        max_new_tokens: longest response.
    """

    def __init__(self, config: RewardConfig, members: int, max_new_tokens: int) -> None:
        self._config, self._members, self._max_new_tokens = config, members, max_new_tokens
        self._count, self._mean, self._squares = 0, 0.0, 0.0  # of all rewards so far; squares of deviations

    def shape(self, rewards: Doubles, lengths: NDArray[np.int64]) -> Doubles:
        """Shaped rewards [samples]; `rewards` and response lengths [samples], group by group."""
        config = self._config
        if config.normalize == "batch":
            rewards = _normalized(rewards)
        elif config.normalize == "group":
            rewards = np.concatenate([_normalized(group) for group in rewards.reshape(-1, self._members)])
        elif config.normalize == "running":
            self._observe(rewards[~np.isnan(rewards)])
            deviation = (self._squares / max(self._count - 1, 1)) ** 0.5
            rewards = (rewards - self._mean) / max(deviation, _LEAST_DEVIATION)
        if config.clip is not None:
            rewards = rewards.clip(-config.clip, config.clip)
        if config.length_penalty:
            # DAPO (arXiv 2503.14476), equation 13: 0 up to the free length, then linear.
            excess = (lengths - config.length_free) / max(self._max_new_tokens - config.length_free, 1)
            rewards = rewards - config.length_penalty * excess.clip(0.0, 1.0)
        return rewards

    def state_dict(self) -> dict[str, Any]:
        """The moments of all rewards so far, as JSON for checkpoints."""
        return {"count": self._count, "mean": self._mean, "squares": self._squares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._count, self._mean, self._squares = int(state["count"]), float(state["mean"]), float(state["squares"])

    def _observe(self, rewards: Doubles) -> None:
        """Combine the moments of more rewards with those so far (Chan, Golub, LeVeque 1979)."""
        if not len(rewards):
            return
        total, mean = self._count + len(rewards), float(rewards.mean())
        difference = mean - self._mean
        self._squares += float(((rewards - mean) ** 2).sum()) + difference**2 * self._count * len(rewards) / total
        self._mean += difference * len(rewards) / total
        self._count = total


def _normalized(rewards: Doubles) -> Doubles:
    """To mean 0 and (unbiased) deviation 1 over the rewards that are not NaN; 0 where they are equal or only one."""
    there = rewards[~np.isnan(rewards)]
    if len(there) < 2:
        return rewards * 0.0
    return (rewards - there.mean()) / max(float(there.std(ddof=1)), _LEAST_DEVIATION)
