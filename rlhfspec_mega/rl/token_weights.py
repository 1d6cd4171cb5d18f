"""Weights of tokens in the loss; a mini-batch determines them, however it is split into micro-batches and ranks."""

from __future__ import annotations

from torch import Tensor

from rlhfspec_mega.errors import UserError


def token_weights(lengths: Tensor, learning: Tensor, loss_agg_mode: str) -> tuple[Tensor, int]:
    """Weight of every response token of each sample, and the number of tokens in the loss.

    The loss of a mini-batch is sum(weight * token loss) / count, both over the whole mini-batch: partial sums of
    micro-batches and data-parallel ranks just add up. The weights' mean over the tokens in the loss is 1.

    Args:
        lengths: int [samples], response tokens of all samples of the mini-batch.
        learning: bool [samples]; False: masked, weight 0, not counted.
        loss_agg_mode: "token-mean": each token counts the same; "seq-mean-token-mean": each sample counts the same,
            whatever its length.

    Returns: float64 [samples], and count, at least 1 (a mini-batch without any token has loss 0).
    Raises: UserError for another `loss_agg_mode`.
    """
    used = (learning & (lengths > 0)).double()
    tokens = lengths.double() * used
    count = int(tokens.sum())
    if loss_agg_mode == "token-mean":
        return used, max(count, 1)
    if loss_agg_mode == "seq-mean-token-mean":
        per_sample = count / used.sum().clamp(min=1)
        return used * per_sample / lengths.clamp(min=1), max(count, 1)
    raise UserError(f"algorithm.loss_agg_mode={loss_agg_mode} is unknown: use token-mean or seq-mean-token-mean.")
