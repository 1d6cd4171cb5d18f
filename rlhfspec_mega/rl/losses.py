"""Per-token losses: clipped policy gradient, KL to the reference, truncated importance weights, entropy, values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhfspec_mega.config.schema.training import AlgorithmConfig
from rlhfspec_mega.errors import UserError


@dataclass(frozen=True)
class TokenInputs:
    """What the loss needs of each token; all tensors have the same shape, any shape, and finite values.

    Attributes:
        logprobs: of the current policy, with gradient.
        old_logprobs: of the policy before this step's updates, recomputed by the actor.
        advantages: of the token's sample.
        engine_logprobs: the engine's, recorded while sampling; for tis_clip.
        reference_logprobs: of the frozen reference; for the KL in the loss.
        entropy: of the policy's distribution, with gradient where there is an entropy bonus.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    engine_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    entropy: Tensor | None = None


def token_losses(inputs: TokenInputs, config: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of each token and per-token metrics without gradient; the caller averages both over tokens.

    Metrics: ratio, clip_fraction (0 or 1), approx_kl (k3 estimate of KL(old || current)); kl (reference), tis_weight
    and entropy if their inputs are given.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    loss, clipped = clipped_policy_loss(
        log_ratio, inputs.advantages, config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c
    )
    ratio = log_ratio.detach().exp()
    metrics = {"ratio": ratio, "clip_fraction": clipped, "approx_kl": ratio - 1 - log_ratio.detach()}
    if config.tis_clip is not None and inputs.engine_logprobs is not None:
        weight = truncated_importance_weight(inputs.old_logprobs, inputs.engine_logprobs, config.tis_clip)
        loss = loss * weight
        metrics["tis_weight"] = weight
    if inputs.reference_logprobs is not None:
        metrics["kl"] = kl_estimate(inputs.logprobs.detach(), inputs.reference_logprobs, config.kl_loss_type)
        if config.kl_in == "loss" and config.kl_coef:
            kl = kl_loss(inputs.logprobs, inputs.old_logprobs, inputs.reference_logprobs, config.kl_loss_type)
            loss = loss + config.kl_coef * kl
    if inputs.entropy is not None:
        metrics["entropy"] = inputs.entropy.detach()
        if config.entropy_coef:
            loss = loss - config.entropy_coef * inputs.entropy
    return loss, metrics


def clipped_policy_loss(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic clipped objective (arXiv 1707.06347), negated, with separate bounds (DAPO, arXiv 2503.14476).

    Args:
        dual_clip: largest ratio that counts at a negative advantage (dual clip, arXiv 1912.09729); None: no such bound.

    Returns: the loss -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and 1.0 where a clip decided, else 0.0.
    """
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss, decided = torch.maximum(plain, clipped), clipped > plain
    if dual_clip is not None:
        bound = torch.where(advantages < 0, -advantages * dual_clip, torch.inf)
        loss, decided = torch.minimum(loss, bound), decided | (bound < loss)
    return loss, decided.detach().to(plain.dtype)


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Half the squared error of a critic; with `clip` the larger of it and that of a value kept so near its old one.

    As in PPO's reference implementation (github.com/openai/baselines, ppo2). All tensors have one shape.

    Returns: the loss, and 1.0 where the clipped value decided, else 0.0.
    """
    plain = (values - returns).square() / 2
    if clip is None:
        return plain, torch.zeros_like(plain)
    kept = old_values + (values - old_values).clamp(-clip, clip)
    clipped = (kept - returns).square() / 2
    return torch.maximum(plain, clipped), (clipped > plain).detach().to(plain.dtype)


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) at tokens the policy sampled (Schulman, "Approximating KL
    divergence", 2020): k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x with x = log policy - log reference.

    k1 and k3 are unbiased, k3 is never negative, k2 is biased. Raises UserError for another name.
    """
    x = logprobs - reference_logprobs
    if estimator == "k1":
        return x
    if estimator == "k2":
        return x.square() / 2
    if estimator == "k3":
        return torch.expm1(-x) + x
    raise UserError(f"algorithm.kl_loss_type={estimator} is unknown: use k1, k2 or k3.")


def kl_loss(logprobs: Tensor, old_logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """A loss whose value is the chosen estimate and whose expected gradient is that of KL(policy || reference).

    Differentiating the estimates as they stand does not give that: k1 has gradient zero in expectation and k3 that of
    the KL in the other direction. Over tokens sampled from the old policy the KL's gradient is the mean of
    r x grad log policy, with r = policy / old and x = log policy - log reference; every estimator gets this gradient,
    which is also what r k3 differentiates to. The value is weighted by r as well: k1 and k3 stay unbiased off-policy.
    """
    log_policy = logprobs.detach()
    ratio = (log_policy - old_logprobs).exp()
    value = ratio * kl_estimate(log_policy, reference_logprobs, estimator)
    return value + ratio * (log_policy - reference_logprobs) * (logprobs - log_policy)


def truncated_importance_weight(old_logprobs: Tensor, engine_logprobs: Tensor, cap: float) -> Tensor:
    """min(actor / engine probability, cap), a constant: corrects for the engine's sampling distribution differing from
    the actor's (truncated importance sampling, Ionides 2008)."""
    return (old_logprobs - engine_logprobs).exp().clamp(max=cap).detach()
