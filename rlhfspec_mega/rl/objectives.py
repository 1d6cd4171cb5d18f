"""What an update minimises per token of a micro-batch: the policy's or the critic's objective, or log-likelihood."""

from __future__ import annotations

import torch
import torch.nn.functional as F

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
    """Clipped policy gradient, with KL as configured (see losses.token_losses); all tensors [rows, length].

    Without log-probs of the old policy in the micro-batch, it is the policy itself.
    """
    device = logprobs.device
    # Outside the response, padding would feed arbitrary log-probs into exp(): there the policy counts as unchanged.
    mask = batch.mask.to(device)
    inside = torch.where(mask, logprobs, 0.0)
    uses_reference = config.kl_coef > 0
    old = batch.columns.get("old_logprobs", inside.detach())
    return token_losses(
        TokenInputs(
            logprobs=inside,
            old_logprobs=old.to(device),
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


def preference_objective(
    scores: torch.Tensor, batch: MicroBatch, *, margin: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-log sigmoid(chosen - rejected - margin) of pairs of samples that follow each other; all tensors [rows, length].

    Each sample has one score. Both of a pair have the pair's loss, so that the mean is that over pairs.
    """
    mask = batch.mask.to(scores.device)
    differences = scores[mask].view(-1, 2) @ scores.new_tensor([1.0, -1.0])

    def at_scores(of_pairs: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(scores).masked_scatter(mask, of_pairs.repeat_interleave(2))

    return at_scores(F.softplus(margin - differences)), {"accuracy": at_scores((differences > 0).to(scores.dtype))}


VALUE_METRICS = ("clip_fraction", "value")


def policy_metrics(config: AlgorithmConfig) -> list[str]:
    """Names of the metrics that `policy_objective` reports under this configuration."""
    names = ["ratio", "clip_fraction", "approx_kl", "entropy"]
    names += ["kl"] if config.kl_coef > 0 else []
    return names + (["tis_weight"] if config.tis_clip is not None else [])
