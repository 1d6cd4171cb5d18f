"""What an update minimises per token of a micro-batch: the policy's or the critic's objective, or log-likelihood."""

from __future__ import annotations

import torch

from rlhfspec_mega.config.schema.training import AlgorithmConfig
from rlhfspec_mega.rl.losses import TokenInputs, clipped_value_loss, token_losses
from rlhfspec_mega.rl.microbatch import MicroBatch


def supervised_objective(
    logprobs: torch.Tensor, entropy: torch.Tensor, batch: MicroBatch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Negative log-likelihood of the response tokens; all tensors [rows, length]."""
    return -logprobs, {}


def policy_objective(
    logprobs: torch.Tensor, entropy: torch.Tensor, batch: MicroBatch, *, config: AlgorithmConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped policy gradient, with KL as configured (see losses.token_losses); all tensors [rows, length]."""
    device = logprobs.device
    # Outside the response, padding would feed arbitrary log-probs into exp(): there the policy counts as unchanged.
    mask = batch.mask.to(device)
    inside = torch.where(mask, logprobs, 0.0)
    uses_reference = config.kl_coef > 0
    return token_losses(
        TokenInputs(
            logprobs=inside,
            old_logprobs=batch.columns["old_logprobs"].to(device),
            advantages=batch.columns["advantages"].to(device),
            engine_logprobs=batch.columns["engine_logprobs"].to(device),
            reference_logprobs=batch.columns["reference_logprobs"].to(device) if uses_reference else None,
            entropy=entropy,
        ),
        config,
    )


def value_objective(
    values: torch.Tensor, batch: MicroBatch, *, clip: float | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Squared error to the returns, clipped as losses.clipped_value_loss says; all tensors [rows, length]."""
    device = values.device
    old, returns = (batch.columns[name].to(device) for name in ("values", "returns"))
    inside = torch.where(batch.mask.to(device), values, 0.0)
    losses, clipped = clipped_value_loss(inside, old, returns, clip)
    return losses, {"clip_fraction": clipped, "value": inside}


SLOPE = "slope"  # the column of derivatives of a loss by the values


def linear_objective(values: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Values times given derivatives of a loss, whose gradient is that of the loss; all tensors [rows, length]."""
    inside = torch.where(batch.mask.to(values.device), values, 0.0)
    return inside * batch.columns[SLOPE].to(values.device), {}


VALUE_METRICS = ("clip_fraction", "value")


def policy_metrics(config: AlgorithmConfig) -> list[str]:
    """Names of the metrics that `policy_objective` reports under this configuration."""
    names = ["ratio", "clip_fraction", "approx_kl", "entropy"]
    names += ["kl"] if config.kl_coef > 0 else []
    return names + (["tis_weight"] if config.tis_clip is not None else [])
