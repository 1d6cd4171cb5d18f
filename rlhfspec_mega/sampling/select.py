"""Token choice under shared noise: argmax(log p + g) with p = softmax(logits / T); T = 0 is greedy."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Selection(NamedTuple):
    """Chosen tokens int64 and their log-probabilities float32, of one shape."""

    tokens: torch.Tensor
    logprobs: torch.Tensor


def scaled_logits(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """logits / T in float32, with T = 1 in greedy rows; logits [..., V], temperatures [...]."""
    return logits.float() / torch.where(temperatures > 0, temperatures, 1.0)[..., None]


def perturbed_scores(
    scaled: torch.Tensor, temperatures: torch.Tensor, noise: torch.Tensor | None, banned: torch.Tensor | None = None
) -> torch.Tensor:
    """Scores float64 [..., V] whose order is that of log p + g; target and draft are ranked by the same function.

    The normaliser of log p is the same for a whole row, so the scores leave it out.

    Args:
        scaled: float32 [..., V] from `scaled_logits`.
        temperatures: float32 [...]; 0 means greedy.
        noise: float64 [..., V] from `noise.gumbel`, ignored in greedy rows; None if every row is greedy.
        banned: bool [..., V], tokens that may not be chosen.
    """
    scores = scaled.double()
    if noise is not None:
        scores.addcmul_(noise, (temperatures > 0)[..., None].double())  # greedy rows: finite noise times zero
    if banned is not None:
        scores.masked_fill_(banned, float("-inf"))
    return scores


def select_tokens(
    logits: torch.Tensor, temperatures: torch.Tensor, noise: torch.Tensor | None, banned: torch.Tensor | None = None
) -> Selection:
    """Choose one token per row of logits float [..., V] over the true vocabulary; arguments as `perturbed_scores`.

    An argmax over log p + g is an exact sample of p (Gumbel-max; Gumbel 1954, Maddison et al. 2014).

    Returns:
        tokens and log_softmax(logits / T) of each over the full vocabulary, as the actor's, with T = 1 in greedy rows.
    """
    scaled = scaled_logits(logits, temperatures)
    tokens = perturbed_scores(scaled, temperatures, noise, banned).argmax(dim=-1)
    logprobs = scaled.log_softmax(dim=-1).gather(-1, tokens[..., None])
    return Selection(tokens, logprobs[..., 0])
