"""How often draft and target choose the same token under shared Gumbel noise, in closed form.

With E_w = exp(-g_w), independent and exponential, argmax(log p + g) is argmin E_w / p_w. Both p and q choose v exactly
if E_w >= E_v * m_w for every w, with m_w = max(p_w / p_v, q_w / q_v) and m_v = 1. Given E_v = e that has probability
exp(-e * sum_{w != v} m_w); integrated over e's density exp(-e) it is 1 / sum_w m_w. The sum over v is the probability
of agreement (the Gumbel coupling, Daliri, Musco and Suresh 2024, arXiv 2408.07978).

m_w is p_w / p_v exactly if p_w / q_w >= p_v / q_v: in the order of p / q, partial sums of p and of q give all the sums.
"""

from __future__ import annotations

from torch import Tensor

TOP = 32  # most probable tokens of the target that are compared one by one
_LEAST = 1e-30  # ratios of probabilities stay finite in float32


def agreement(target: Tensor, draft: Tensor) -> Tensor:
    """Probability [N] that target and draft choose the same token at T > 0.

    Args:
        target, draft: probabilities [N, tokens] of the same tokens, usually the target's `TOP` most probable ones. The
            mass they lack of 1 is treated as one more token whose ratio is bounded by p / p_v + q / q_v: the result is
            exact if the target lacks nothing, and else too low by at most twice the mass it lacks.
    """
    rest = [(1 - x.sum(-1, keepdim=True)).clamp(min=0) for x in (target, draft)]
    p, q = target.clamp(min=_LEAST), draft.clamp(min=_LEAST)
    order = (p / q).argsort(dim=-1)
    p, q = p.gather(-1, order), q.gather(-1, order)
    # Sums as products with a triangle: a cumulative sum of floats has no deterministic kernel on a GPU.
    ones = p.new_ones(p.shape[-1], p.shape[-1])
    sums = (p @ ones.tril() + rest[0]) / p + (q @ ones.triu(1) + rest[1]) / q
    return (1 / sums).sum(-1)


def expected_accepted(agreements: Tensor) -> Tensor:
    """Expected accepted length [N, depth] of chains of 1 .. depth draft tokens that agree with chances [N, depth]."""
    return agreements.cumprod(dim=-1).cumsum(dim=-1)
