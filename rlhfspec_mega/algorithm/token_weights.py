"""Weights of tokens in the loss, fixed by the whole mini-batch, so that micro-batches and ranks do not change it."""

from __future__ import annotations

from torch import Tensor

from rlhfspec_mega.errors import UserError


def token_weights(lengths: Tensor, learning: Tensor, loss_average: str) -> tuple[Tensor, int]:
    """Weight of every response token of each sample, and the number of tokens in the loss.

    The loss of a mini-batch is sum(weight * token loss) / count, both over the whole mini-batch: partial sums of
    micro-batches and data-parallel ranks just add up. The weights' mean over the tokens in the loss is 1.

    Args:
        lengths: int [samples], response tokens of all samples of the mini-batch.
        learning: bool [samples]; False: masked, weight 0, not counted.
        loss_average: "token": each token counts the same; "sample": each sample counts the same, whatever its length.

    Returns: float64 [samples], and count, at least 1 (a mini-batch without any token has loss 0).
    Raises: UserError for another `loss_average`.
    """
    used = (learning & (lengths > 0)).double()
    tokens = lengths.double() * used
    count = int(tokens.sum())
    if loss_average == "token":
        return used, max(count, 1)
    if loss_average == "sample":
        per_sample = count / used.sum().clamp(min=1)
        return used * per_sample / lengths.clamp(min=1), max(count, 1)
    raise UserError(f"algorithm.loss_average={loss_average} is unknown: use token or sample.")
