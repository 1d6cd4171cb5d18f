"""Chooses the algorithm of a run: one of this package, or one with a user's advantage or loss by import path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlhfspec_mega.algorithms.group_relative import GroupRelative
from rlhfspec_mega.algorithms.grpo import GRPO
from rlhfspec_mega.algorithms.policy_gradient import PolicyGradient
from rlhfspec_mega.algorithms.ppo import PPO
from rlhfspec_mega.algorithms.rloo import RLOO
from rlhfspec_mega.config.import_path import BadImportPath, load_function
from rlhfspec_mega.config.schema.training import AlgorithmConfig, CriticConfig
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.rl.shaping import RewardShaping

OURS: dict[str, type[GroupRelative]] = {"grpo": GRPO, "rloo": RLOO}


class OwnAdvantage(GroupRelative):
    """An algorithm whose advantages come from a user's function of the rewards [prompts, members]."""

    def __init__(self, function: Callable[[Tensor], Tensor], *args: Any) -> None:
        super().__init__(*args)
        self._function = function

    def advantages(self, rewards: Tensor) -> Tensor:
        """The function's result. A sample without a reward is given its group's mean, and is not in the loss."""
        means = rewards.nanmean(dim=1, keepdim=True).nan_to_num(0.0)
        return self._function(torch.where(rewards.isnan(), means, rewards))


def make_algorithm(
    config: AlgorithmConfig,
    members: int,
    samples_per_update: int,
    critic: CriticConfig | None = None,
    shaping: RewardShaping | None = None,
) -> PolicyGradient:
    """The run's algorithm.

    Args:
        members: samples of each prompt.
        critic: of PPO; None: its defaults.
        shaping: of rewards; None: they are used as they are.

    Raises UserError for an import path that leads to no function.
    """
    loss = _own(config.loss, "algorithm.loss") if config.loss else None
    arguments = (config, members, samples_per_update, loss, shaping)
    if config.adv_estimator == "gae":
        return PPO(*arguments, critic=critic or CriticConfig())
    if config.adv_estimator in OURS:
        return OURS[config.adv_estimator](*arguments)
    return OwnAdvantage(_own(config.adv_estimator, "algorithm.adv_estimator"), *arguments)


def _own(path: str, option: str) -> Callable[..., Any]:
    try:
        return load_function(path)
    except BadImportPath as error:
        raise UserError(f"{option}={path} {error}.") from error
