"""How often draft and target choose the same token under shared Gumbel noise, in closed form.

With E_w = exp(-g_w), independent and exponential, argmax(log p + g) is argmin E_w / p_w. Both p and q choose v exactly
if E_w >= E_v * m_w for every w, with m_w = max(p_w / p_v, q_w / q_v) and m_v = 1. Given E_v = e that has probability
exp(-e * sum_{w != v} m_w); integrated over e's density exp(-e) it is 1 / sum_w m_w. The sum over v is the probability
of agreement (the Gumbel coupling, Daliri, Musco and Suresh 2024, arXiv 2408.07978).
"""

from __future__ import annotations

import torch
from torch import Tensor

TOP = 64  # choices of the target that are summed over
_LEAST = 1e-30  # ratios of probabilities stay finite in float32


def agreement(target: Tensor, draft: Tensor, top: int = TOP) -> Tensor:
    """Probability [N] that the two choose the same token at T > 0.

    Args:
        target: probabilities [N, draft vocabulary]; what they lack of 1 lies outside the draft's vocabulary.
        draft: probabilities [N, draft vocabulary].
        top: tokens v that are summed over, and w that are told apart: the target's most probable ones. All others are
            one w whose ratio is bounded by p / p_v + q / q_v. So the result is exact when `top` covers the vocabulary,
            and else too low by twice the target's mass on the others at most.
    """
    p, tokens = target.topk(min(top, target.shape[-1]), dim=-1)
    q = draft.gather(-1, tokens)
    rest_p, rest_q = (1 - p.sum(-1, keepdim=True)).clamp(min=0), (1 - q.sum(-1, keepdim=True)).clamp(min=0)
    p, q = p.clamp(min=_LEAST), q.clamp(min=_LEAST)
    ratios = torch.maximum(p[..., None, :] / p[..., None], q[..., None, :] / q[..., None])
    return (1 / (ratios.sum(-1) + rest_p / p + rest_q / q)).sum(-1)


def expected_accepted(agreements: Tensor) -> Tensor:
    """Expected accepted length [N, depth] of chains of 1 .. depth draft tokens that agree with chances [N, depth]."""
    return agreements.cumprod(dim=-1).cumsum(dim=-1)
