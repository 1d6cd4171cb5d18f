"""Token choice under shared noise: argmax(log p + g) with p = softmax(logits / T); T = 0 is greedy."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Selection(NamedTuple):
    """Chosen tokens int64 and their log-probabilities float32, of one shape."""

    tokens: torch.Tensor
    logprobs: torch.Tensor


def select_tokens(
    logits: torch.Tensor, temperatures: torch.Tensor, noise: torch.Tensor | None, banned: torch.Tensor | None = None
) -> Selection:
    """Choose one token per row of logits; the leading shapes need only broadcast.

    An argmax over log p + g is an exact sample of p (Gumbel-max; Gumbel 1954, Maddison et al. 2014). The normaliser
    of log p is the same for a whole row, so the scores leave it out.

    Args:
        logits: float [..., V] over the true vocabulary.
        temperatures: float32 [...]; 0 means greedy.
        noise: float64 [..., V] from `noise.gumbel`, ignored in greedy rows; None if every row is greedy.
        banned: bool [..., V], tokens that may not be chosen. Log-probs still cover the full vocabulary, as the actor's.

    Returns:
        tokens and log_softmax(logits / T) of each, with T = 1 in greedy rows.
    """
    sampled = temperatures > 0
    scaled = logits.float() / torch.where(sampled, temperatures, 1.0)[..., None]
    scores = scaled.double()
    if noise is not None:
        scores.addcmul_(noise, sampled[..., None].double())  # greedy rows: finite noise times zero
    if banned is not None:
        scores.masked_fill_(banned, float("-inf"))
    tokens = scores.argmax(dim=-1)
    logprobs = scaled.log_softmax(dim=-1).gather(-1, tokens[..., None])
    return Selection(tokens, logprobs[..., 0])
