"""Advantages within groups of samples (GRPO, RLOO), over-long samples, KL in the reward, and shuffled advantages.

A run with shuffled advantages is a control: it must not learn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhfspec_mega.config.schema.training import AlgorithmConfig

_EQUAL = 1e-6  # smaller differences of rewards within a group count as none


def grpo(rewards: Tensor, norm_adv_by_std: bool) -> Tensor:
    """Reward minus the group's mean, divided by the group's standard deviation if asked for.

    From DeepSeekMath (arXiv 2402.03300); without the division Dr. GRPO (arXiv 2503.20783). The deviation is unbiased.

    Args:
        rewards: [prompts, members]; NaN: no reward, so that the sample has no part in the group's mean and deviation.

    Returns: [prompts, members]; zero without a reward, and where all members of a group have the same one.
    """
    mean, deviation = _moments(rewards)
    centered = rewards - mean
    if norm_adv_by_std and rewards.shape[1] > 1:
        centered = centered / deviation.clamp(min=_EQUAL)
    return centered.masked_fill(degenerate(rewards)[:, None] | rewards.isnan(), 0.0)


def rloo(rewards: Tensor) -> Tensor:
    """Reward minus the mean reward of the other members (arXiv 2402.14740); [prompts, members]; zero for one member.

    A member without a reward has NaN: it is not among the others, and its advantage is zero.
    """
    others = (~rewards.isnan()).sum(dim=1, keepdim=True) - 1
    baseline = (rewards.nansum(dim=1, keepdim=True) - rewards) / others.clamp(min=1)
    return (rewards - baseline).masked_fill(degenerate(rewards)[:, None] | rewards.isnan(), 0.0)


def degenerate(rewards: Tensor) -> Tensor:
    """Groups [prompts] whose members all have the same reward, or none (NaN): nothing can be learnt from them."""
    missing = rewards.isnan()
    highest, lowest = rewards.masked_fill(missing, -torch.inf), rewards.masked_fill(missing, torch.inf)
    return highest.amax(dim=1) - lowest.amin(dim=1) < _EQUAL


def _moments(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased deviation of each group's rewards that are not NaN, [prompts, 1]."""
    mean = rewards.mean(dim=1, keepdim=True)
    deviation = rewards.std(dim=1, keepdim=True) if rewards.shape[1] > 1 else torch.zeros_like(mean)
    for group in rewards.isnan().any(dim=1).nonzero().flatten().tolist():
        there = rewards[group][~rewards[group].isnan()]
        mean[group] = there.mean()
        deviation[group] = there.std() if len(there) > 1 else 0.0
    return mean, deviation


def shaped_rewards(rewards: Tensor, truncated: Tensor, kl: Tensor | None, config: AlgorithmConfig) -> Tensor:
    """Rewards after the over-long penalty, minus, with kl_in=reward, kl_coef times the sample's KL to the reference.

    Args:
        rewards, truncated (bool), kl: [prompts, members]; kl is the sum of a sample's per-token estimates.
    """
    if config.overlong == "penalize":
        rewards = rewards - config.overlong_penalty * truncated
    if config.kl_in == "reward" and kl is not None:
        rewards = rewards - config.kl_coef * kl
    return rewards


def learning_samples(truncated: Tensor, config: AlgorithmConfig) -> Tensor:
    """Which samples are in the loss (bool, shape of `truncated`): with overlong=mask all but the truncated ones.

    A masked sample still counts in its group's mean: leaving it out would reward the others for its failure to end.
    """
    return ~truncated if config.overlong == "mask" else torch.ones_like(truncated)


def shuffled(advantages: Tensor, generator: torch.Generator) -> Tensor:
    """The shuffle control: advantages are permuted among all samples, so that nothing can be learnt."""
    order = torch.randperm(advantages.numel(), generator=generator)
    return advantages.flatten()[order].view_as(advantages)
