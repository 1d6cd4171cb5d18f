"""The compiled regressions against their formulas in numpy, and against brute force."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rlhfspec_mega.planning.regression import (
    CLIP,
    COMMON_SHARE,
    FORGETTING,
    INITIAL_ERROR,
    MIN_ERROR,
    RecursiveRegression,
    isotonic_regression,
)
from rlhfspec_mega.planning.tree import Floats

NONNEGATIVE = 2


class Reference:
    """The recursion of RecursiveRegression's docstring, in matrix products."""

    def __init__(self, coefficients: Floats, covariance: Floats) -> None:
        self.coefficients, self.covariance = coefficients.copy(), covariance.copy()
        self.usual, self.count = INITIAL_ERROR, 0

    def observe(self, row: Floats, target: float) -> float:
        self.count += 1
        predicted = max(row @ self.coefficients, 0.1 * target)
        error = np.clip(target / predicted - 1.0, -CLIP * self.usual, CLIP * self.usual)
        self.usual = max(self.usual + 0.05 * (abs(error) - self.usual), MIN_ERROR)
        scale = 1.0 + max(COMMON_SHARE, 1.0 / self.count) * error
        x = row / (predicted * scale)
        known = x @ self.covariance @ x
        gain = self.covariance @ x
        kept = FORGETTING - (1.0 - FORGETTING) / known
        self.coefficients = self.coefficients * scale + gain * ((1.0 + error) / scale - 1.0) / (1.0 + known)
        self.covariance = self.covariance - np.outer(gain, gain) / (1.0 / kept + known)
        self.coefficients[-NONNEGATIVE:] = np.maximum(self.coefficients[-NONNEGATIVE:], 0.0)
        return float(scale)


def test_recursive_regression_is_its_formula() -> None:
    """Also where errors are clipped, and where coefficients would fall below 0."""
    rng, count = np.random.default_rng(0), 6
    true = rng.uniform(0.5, 2.0, count)
    true[-NONNEGATIVE:] = 0.0, 0.1
    coefficients, covariance = np.ones(count), np.diag(rng.uniform(0.5, 4.0, count))
    regression = RecursiveRegression(coefficients, covariance, NONNEGATIVE)
    reference, bounded = Reference(coefficients, covariance), 0
    for step in range(400):
        row = rng.uniform(0.0, 1.0, count) * (rng.random(count) < 0.7) + 1e-3
        target = float(row @ true) * rng.lognormal(0.0, 0.1) * (5.0 if step % 50 == 49 else 1.0)
        expected = reference.observe(row, target)
        np.testing.assert_allclose(regression.observe(row, target), expected, rtol=1e-9)
        np.testing.assert_allclose(regression.coefficients, reference.coefficients, rtol=1e-8, atol=1e-12)
        np.testing.assert_allclose(regression.variances, reference.covariance.diagonal(), rtol=1e-7)
        bounded += (reference.coefficients[-NONNEGATIVE:] == 0.0).any()
    assert bounded > 0, "the bound was met"


@given(
    st.integers(1, 9).flatmap(
        lambda count: st.tuples(
            arrays(np.float64, count, elements=st.floats(-4.0, 4.0)),
            arrays(np.float64, count, elements=st.floats(0.1, 4.0)),
        )
    )
)
def test_isotonic_regression_is_the_best_of_all_blocks(given_values: tuple[Floats, Floats]) -> None:
    """By the minimax formula (Robertson, Wright and Dykstra 1988, theorem 1.4.4)."""
    values, weights = given_values
    before = values.copy(), weights.copy()

    def mean(first: int, last: int) -> float:
        some = slice(first, last + 1)
        return float(np.average(values[some], weights=weights[some]))

    count = len(values)
    expected = [max(min(mean(a, b) for b in range(i, count)) for a in range(i + 1)) for i in range(count)]
    np.testing.assert_allclose(isotonic_regression(values, weights), expected, atol=1e-9)
    assert (values == before[0]).all() and (weights == before[1]).all(), "what was given is as it was"
