"""The weight of the KL penalty in the reward: fixed, or adapted so that the divergence stays near a target."""

from __future__ import annotations

_LARGEST_ERROR = 0.2


class KlController:
    """Multiplies the weight after each step by 1 + error x samples / horizon.

    The error is divergence over target minus 1, cut to 0.2 ("Fine-tuning language models from human preferences",
    arXiv 1909.08593, section 2.2).

    Args:
        target: divergence of a sample, summed over its tokens, in nats; None: the weight stays.
        horizon: in samples.
    """

    def __init__(self, weight: float, target: float | None, horizon: int) -> None:
        self.weight, self._target, self._horizon = weight, target, horizon

    def observe(self, divergence: float, samples: int) -> None:
        """Adapt the weight to a step of so many samples with this mean divergence."""
        if self._target is not None:
            error = min(max(divergence / self._target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
            self.weight *= 1 + error * samples / self._horizon
