"""Options of rewards: where they come from, what becomes of failures, and how they are shaped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhfspec_mega.config.option import option, section

FUNCTION, SERVICE, REWARD_MODEL = "a reward function", "a reward service", "a reward model"


@dataclass
class RemoteRewardConfig:
    url: str | None = option(
        None, 'address of a service that answers {"samples": [...]} with {"rewards": [...]}; null: there is none'
    )
    weight: float = option(1.0, "of its score in the reward", least=0, only_with=SERVICE)
    batch_size: int = option(64, "most samples of a request", least=1, only_with=SERVICE)
    timeout: float = option(
        30.0, "after which a request without an answer is repeated", unit="seconds", above=0, only_with=SERVICE
    )
    deadline: float = option(
        600.0,
        "for which a service that stays away is asked again; then the run saves and ends",
        unit="seconds",
        least=0,
        only_with=SERVICE,
    )


@dataclass
class RewardModelConfig:
    path: str | None = option(
        None, "Hugging Face directory of a sequence classifier with one score; null: there is none"
    )
    weight: float = option(1.0, "of its score in the reward", least=0, only_with=REWARD_MODEL)


@dataclass
class RewardConfig:
    function: str | None = option(
        "rlhfspec_mega.reward.chain_sums.reward", "import path of a rule, package.module.function; null: there is none"
    )
    weight: float = option(1.0, "of the function's value in the reward", least=0, only_with=FUNCTION)
    time_limit: float = option(
        5.0, "longest time of the function for one sample", unit="seconds", above=0, only_with=FUNCTION
    )
    arguments: dict[str, Any] = option(
        {}, "keyword arguments of the function: +reward.arguments.NAME=VALUE", only_with=FUNCTION
    )
    remote: RemoteRewardConfig = section(RemoteRewardConfig, "a remote reward service")
    model: RewardModelConfig = section(RewardModelConfig, "a reward model")
    max_failures: float = option(
        0.2,
        "a run ends if a larger share of a step's samples has no reward, because a function or service failed",
        least=0,
        most=1,
    )
    normalize: str = option(
        "none",
        "rewards to mean 0 and deviation 1: over a step's samples, over each prompt's, or over all of the run so far",
        choices=("none", "batch", "group", "running"),
    )
    clip: float | None = option(None, "largest absolute value, after normalization; null: no bound", above=0)
    length_penalty: float = option(
        0.0,
        "taken off for a response of rollout.max_new_tokens, and less for shorter ones, down to 0 at length_free "
        "(DAPO's soft punishment)",
        least=0,
    )
    length_free: int = option(
        0, "longest response that is not penalized", unit="tokens", least=0, only_with="reward.length_penalty>0"
    )
