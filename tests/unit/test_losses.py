"""Losses in float64 against formulas case by case, finite differences, and exact expectations."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfspec_mega.config.schema.training import AlgorithmConfig
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.rl.losses import (
    TokenInputs,
    clipped_policy_loss,
    clipped_value_loss,
    kl_estimate,
    kl_loss,
    token_losses,
    truncated_importance_weight,
)


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@settings(max_examples=200, deadline=None)
@given(
    log_ratio=st.floats(-1.5, 1.5),
    advantage=st.floats(-3, 3),
    low=st.floats(0.05, 0.5),
    high=st.floats(0.05, 0.5),
)
def test_clipped_loss_and_gradient_case_by_case(log_ratio, advantage, low, high):
    ratio = math.exp(log_ratio)
    outside = (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)
    bound = 1 + high if advantage > 0 else 1 - low
    x = vector(log_ratio).requires_grad_()
    loss, clipped = clipped_policy_loss(x, vector(advantage), low, high)
    loss.sum().backward()
    assert loss.item() == pytest.approx(-advantage * (bound if outside else ratio))
    assert x.grad.item() == pytest.approx(0.0 if outside else -advantage * ratio)
    if abs(advantage) > 1e-6:
        assert bool(clipped) == outside


@settings(max_examples=200, deadline=None)
@given(log_ratio=st.floats(-2, 3), advantage=st.floats(-3, 3), bound=st.floats(1.3, 6))
def test_the_dual_clip_bounds_the_loss_of_a_negative_advantage(log_ratio, advantage, bound):
    x = vector(log_ratio).requires_grad_()
    loss, clipped = clipped_policy_loss(x, vector(advantage), 0.2, 0.2, bound)
    plain, _ = clipped_policy_loss(x.detach(), vector(advantage), 0.2, 0.2)
    cut = advantage < 0 and plain.item() > -advantage * bound
    assert loss.item() == pytest.approx(-advantage * bound if cut else plain.item())
    loss.sum().backward()
    if cut:
        assert x.grad.item() == 0 and bool(clipped)


@settings(max_examples=200, deadline=None)
@given(new=st.floats(-3, 3), old=st.floats(-3, 3), target=st.floats(-3, 3), clip=st.floats(0.1, 1))
def test_the_value_loss_case_by_case(new, old, target, clip):
    value = vector(new).requires_grad_()
    loss, clipped = clipped_value_loss(value, vector(old), vector(target), clip)
    kept = min(max(new, old - clip), old + clip)
    assert loss.item() == pytest.approx(max((new - target) ** 2, (kept - target) ** 2) / 2)
    if abs((kept - target) ** 2 - (new - target) ** 2) > 1e-9:
        assert bool(clipped) == ((kept - target) ** 2 > (new - target) ** 2)
    free, _ = clipped_value_loss(value, vector(old), vector(target), None)
    free.sum().backward()
    assert value.grad.item() == pytest.approx(new - target)


def test_the_entropy_bonus_is_part_of_the_loss_and_has_a_gradient():
    zeros, entropy = torch.zeros(3, dtype=torch.float64), vector(0.1, 0.5, 2.0).requires_grad_()
    loss, metrics = token_losses(
        TokenInputs(zeros, zeros, zeros, entropy=entropy), AlgorithmConfig(entropy_coef=0.3, kl_coef=0.0)
    )
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([-0.03, -0.15, -0.6]) and entropy.grad.tolist() == [-0.3] * 3
    assert metrics["entropy"].tolist() == [0.1, 0.5, 2.0]


def test_gradients_against_finite_differences():
    torch.manual_seed(0)
    old, reference, engine = (torch.randn(6, dtype=torch.float64) * 0.3 - 1 for _ in range(3))
    advantages = torch.randn(6, dtype=torch.float64)
    new = (old + 0.4 * torch.randn(6, dtype=torch.float64)).requires_grad_()
    config = AlgorithmConfig(kl_coef=0.0, tis_clip=1.1)

    def total(logprobs: torch.Tensor) -> torch.Tensor:
        inputs = TokenInputs(logprobs, old, advantages, engine, reference)
        return token_losses(inputs, config)[0].sum()

    assert torch.autograd.gradcheck(total, (new,))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("off_policy", [False, True])
def test_expected_kl_gradient_is_that_of_the_kl(estimator, off_policy):
    """Exact expectation over the old policy's tokens, against autograd of sum p log(p / q)."""
    torch.manual_seed(1)
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(7, dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    old = torch.randn(7, dtype=torch.float64).log_softmax(0) if off_policy else policy.detach()
    exact = (policy.exp() * (policy - reference)).sum()
    [expected] = torch.autograd.grad(exact, logits, retain_graph=True)
    surrogate = (old.exp() * kl_loss(policy, old, reference, estimator)).sum()
    [gradient] = torch.autograd.grad(surrogate, logits)
    torch.testing.assert_close(gradient, expected)
    if estimator != "k2":
        torch.testing.assert_close(surrogate, exact)


def test_kl_estimates():
    policy, reference = vector(-1.0, -2.0, -0.5), vector(-1.5, -2.0, -0.1)
    x = [0.5, 0.0, -0.4]
    assert kl_estimate(policy, reference, "k1").tolist() == pytest.approx(x)
    assert kl_estimate(policy, reference, "k2").tolist() == pytest.approx([v * v / 2 for v in x])
    assert kl_estimate(policy, reference, "k3").tolist() == pytest.approx([math.exp(-v) - 1 + v for v in x])
    with pytest.raises(UserError, match="k1, k2 or k3"):
        kl_estimate(policy, reference, "k4")


def test_importance_weight_is_truncated_and_constant():
    old = vector(-1.0, -1.0, -3.0).requires_grad_()
    weight = truncated_importance_weight(old, vector(-1.2, -4.0, -1.0), 2.0)
    assert weight.tolist() == pytest.approx([math.exp(0.2), 2.0, math.exp(-2.0)])
    assert not weight.requires_grad


def test_terms_add_up_and_metrics_carry_no_gradient():
    new = vector(-1.0, -1.0, -1.0).requires_grad_()
    inputs = TokenInputs(
        logprobs=new,
        old_logprobs=vector(-1.0, -1.5, -0.2),
        advantages=vector(1.0, 1.0, -1.0),
        engine_logprobs=vector(-1.0, -2.5, -0.1),
        reference_logprobs=vector(-1.3, -0.9, -1.0),
        entropy=vector(0.3, 0.2, 0.1),
    )
    config = AlgorithmConfig(kl_coef=0.1, kl_loss_type="k1", tis_clip=1.5, clip_ratio_low=0.2, clip_ratio_high=0.3)
    loss, metrics = token_losses(inputs, config)
    ratio = [1.0, math.exp(0.5), math.exp(-0.8)]
    weight, kl = [1.0, 1.5, math.exp(-0.1)], [0.3, -0.1, 0.0]
    policy = [-1.0, -1.3, 0.8]
    expected = [p * w + 0.1 * r * k for p, w, r, k in zip(policy, weight, ratio, kl, strict=True)]
    assert loss.tolist() == pytest.approx(expected)
    assert metrics["ratio"].tolist() == pytest.approx(ratio)
    assert metrics["clip_fraction"].tolist() == [0.0, 1.0, 1.0]
    assert metrics["approx_kl"].tolist() == pytest.approx([r - 1 - math.log(r) for r in ratio])
    assert metrics["kl"].tolist() == pytest.approx(kl)
    assert metrics["tis_weight"].tolist() == pytest.approx(weight)
    assert metrics["entropy"].tolist() == [0.3, 0.2, 0.1]
    assert not any(metric.requires_grad for metric in metrics.values())


def test_kl_in_the_reward_leaves_the_loss_alone():
    inputs = TokenInputs(vector(-1.0), vector(-1.0), vector(2.0), reference_logprobs=vector(-3.0))
    loss, metrics = token_losses(inputs, AlgorithmConfig(kl_in="reward", kl_coef=5.0))
    assert loss.item() == -2.0 and metrics["kl"].item() == pytest.approx(math.exp(-2.0) + 1.0)
    assert "tis_weight" not in metrics and "entropy" not in metrics
