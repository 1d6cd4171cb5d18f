"""Advantages of PPO in float64 against their definitions, term by term."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfspec_mega.rl.experience import starts
from rlhfspec_mega.rl.gae import (
    advantages_and_returns,
    discounted_sums,
    explained_variance,
    length_adaptive_lambda,
    whitened,
)
from rlhfspec_mega.rl.kl_controller import KlController


@st.composite
def ragged(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rewards, values and offsets of samples of unlike lengths, some of them empty."""
    lengths = draw(st.lists(st.integers(0, 7), min_size=1, max_size=6))
    count, number = sum(lengths), st.floats(-3, 3)
    rewards, values = (np.array(draw(st.lists(number, min_size=count, max_size=count))) for _ in range(2))
    return rewards, values, starts(np.array(lengths))


def by_definition(rewards: list[float], values: list[float], gamma: float, gae_lambda: float) -> list[float]:
    """Equation 16 of arXiv 1506.02438, summed for each token anew."""
    following = [*values[1:], 0.0][: len(values)]
    errors = [r + gamma * after - v for r, v, after in zip(rewards, values, following, strict=True)]
    return [
        sum((gamma * gae_lambda) ** k * error for k, error in enumerate(errors[first:])) for first in range(len(errors))
    ]


@given(ragged(), st.floats(0.1, 1), st.floats(0, 1), st.booleans())
def test_advantages_are_those_of_each_sample_alone(samples, gamma, gae_lambda, apart):
    rewards, values, offsets = samples
    count = len(offsets) - 1
    lambdas = np.linspace(0, gae_lambda, count) if apart else np.full(count, gae_lambda)
    found, returns = advantages_and_returns(rewards, values, offsets, gamma, lambdas if apart else gae_lambda)
    for sample in range(count):
        part = slice(offsets[sample], offsets[sample + 1])
        want = by_definition(rewards[part].tolist(), values[part].tolist(), gamma, float(lambdas[sample]))
        assert found[part] == pytest.approx(want, abs=1e-9)
    assert returns == pytest.approx(found + values)


@given(ragged(), st.floats(0.1, 1))
def test_with_lambda_1_returns_are_discounted_rewards_whatever_the_values(samples, gamma):
    rewards, values, offsets = samples
    _, returns = advantages_and_returns(rewards, values, offsets, gamma, 1.0)
    assert returns == pytest.approx(discounted_sums(rewards, offsets, gamma), abs=1e-9)


def test_no_samples():
    none = np.zeros(0)
    found, returns = advantages_and_returns(none, none, starts(np.zeros(0, np.int64)), 1.0, 0.9)
    assert len(found) == len(returns) == 0


def test_lambda_follows_the_length():
    assert length_adaptive_lambda(np.array([0, 1, 20, 2000]), 0.05).tolist() == [0.0, 0.0, 0.0, 0.99]
    assert length_adaptive_lambda(np.array([10]), 1.0).tolist() == [0.9]


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=30), st.integers(0, 2**30 - 1))
def test_whitening_counts_the_tokens_in_the_loss_of_all_samples(values, bits):
    numbers = np.array(values)
    counted = np.array([bool(bits >> place & 1) for place in range(len(values))])
    found = whitened(numbers, counted)
    assert not found[~counted].any()
    chosen = numbers[counted]
    if len(chosen) and chosen.std() > 1e-6:
        assert found[counted].mean() == pytest.approx(0, abs=1e-9) and found[counted].std() == pytest.approx(1)
        assert found[counted] * chosen.std() + chosen.mean() == pytest.approx(chosen, abs=1e-9)


def test_explained_variance():
    targets = np.array([0.0, 1.0, 2.0, 5.0])
    assert explained_variance(targets, targets + 3) == pytest.approx(1.0)
    assert explained_variance(targets, np.full(4, targets.mean())) == 0.0
    assert explained_variance(targets, -targets) == pytest.approx(-3.0)
    assert math.isnan(explained_variance(np.ones(3), np.zeros(3)))


@given(st.lists(st.floats(0, 20), min_size=1, max_size=20), st.floats(0.1, 10), st.integers(1, 10000))
def test_the_kl_weight_follows_ziegler(divergences, target, horizon):
    adaptive, fixed, want = KlController(0.1, target, horizon), KlController(0.1, None, horizon), 0.1
    for divergence in divergences:
        adaptive.observe(divergence, samples=64)
        fixed.observe(divergence, samples=64)
        want *= 1 + float(np.clip(divergence / target - 1, -0.2, 0.2)) * 64 / horizon
    assert adaptive.weight == pytest.approx(want) and fixed.weight == 0.1
