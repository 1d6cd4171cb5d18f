"""What an update minimises: the policy objective of RL, or supervised log-likelihood, per token of a micro-batch."""

from __future__ import annotations

import torch

from rlhfspec_mega.config.schema.training import AlgorithmConfig
from rlhfspec_mega.rl.losses import TokenInputs, token_losses
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


def policy_metrics(config: AlgorithmConfig) -> list[str]:
    """Names of the metrics that `policy_objective` reports under this configuration."""
    names = ["ratio", "clip_fraction", "approx_kl", "entropy"]
    names += ["kl"] if config.kl_coef > 0 else []
    return names + (["tis_weight"] if config.tis_clip is not None else [])
