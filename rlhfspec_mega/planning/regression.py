"""Recursive linear regression on relative errors, and isotonic regression."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlhfspec_mega.compiled import compiled
from rlhfspec_mega.planning.tree import Floats

FORGETTING = 0.98  # factor on the information along the direction of each new observation
COMMON_SHARE = 0.05  # share of each error that scales all coefficients together
CLIP = 2.5  # errors are clipped at this multiple of the usual error
INITIAL_ERROR = 1.0  # usual error before any observation, so large that nothing is clipped
MIN_ERROR, MAX_FITTED_ERROR = 0.01, 0.05  # bounds of the usual error: the lower always holds, the upper after a fit


class RecursiveRegression:
    """Fits y ~ row @ coefficients by relative errors, since y spans orders of magnitude.

    An observation moves the coefficients in two ways. A small share of its error scales all of them, because a machine
    that has become slower is slower everywhere, not only where this was observed. The rest enters recursive least
    squares with directional forgetting (Kulhavy and Karny, IFAC 1984): the covariance P changes only along P x, and
    x' P x converges to (1 - f) / f. So directions that are not observed are not forgotten, and P stays at or below the
    larger of that bound and its value after `fit`: it does not wind up while a run stays at one batch size.

    Errors beyond `CLIP` times the usual one are clipped there (Huber's rule). The usual error follows the clipped
    errors, so a lasting change takes effect within some tens of observations, and a single outlier (a descheduled
    process) has little effect.
    """

    def __init__(self, coefficients: Floats, covariance: Floats, nonnegative: int) -> None:
        """So many of the last coefficients are kept at 0 or above."""
        self.coefficients: Floats = coefficients.astype(np.float64)
        self._covariance: Floats = covariance.astype(np.float64)
        self._bounded = len(coefficients) - nonnegative  # the first of them
        self._usual_error = INITIAL_ERROR
        self._count = 0

    def fit(self, rows: Floats, targets: Floats, prior: Floats) -> None:
        """Least squares of relative errors: rows [n, k], targets [n] above 0, prior information [k, k]."""
        scaled = rows / targets[:, None]
        information = scaled.T @ scaled + prior
        moments = scaled.sum(axis=0)
        free = np.ones(len(moments), np.bool_)
        bounded = np.zeros(len(moments), np.bool_)
        bounded[self._bounded :] = True
        coefficients: Floats = np.zeros(len(moments))
        while True:  # fix coefficients that would be negative at 0: at most one round per nonnegative coefficient
            coefficients[free] = np.linalg.solve(information[np.ix_(free, free)], moments[free])
            negative = free & bounded & (coefficients < 0)
            if not negative.any():
                break
            free &= ~negative
            coefficients[negative] = 0.0
        self.coefficients = coefficients
        self._covariance = np.linalg.inv(information).astype(np.float64)
        errors = np.abs(scaled @ coefficients - 1.0)
        self._usual_error = float(np.clip(np.median(errors), MIN_ERROR, MAX_FITTED_ERROR))
        self._count = len(targets)

    @property
    def variances(self) -> Floats:
        """Variances of the coefficients: large for those that few observations determine."""
        return self._covariance.diagonal()

    def observe(self, row: Floats, target: float) -> float:
        """Learn from one observation: a row with some entry above 0, and its target above 0.

        Returns the factor by which all coefficients were multiplied before.
        """
        self._count += 1
        share = max(COMMON_SHARE, 1.0 / self._count)  # the first observations mostly set the scale
        scale, self._usual_error = _observe(
            self.coefficients, self._covariance, row, target, share, self._usual_error, self._bounded
        )
        return scale

    def state_dict(self) -> dict[str, Any]:
        """All that was learnt, as plain data for JSON."""
        return {
            "coefficients": self.coefficients.tolist(),
            "covariance": self._covariance.tolist(),
            "usual": self._usual_error,
            "count": self._count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.coefficients = np.array(state["coefficients"])
        self._covariance = np.array(state["covariance"])
        self._usual_error, self._count = state["usual"], state["count"]


@compiled
def _observe(
    coefficients: Floats, covariance: Floats, row: Floats, target: float, share: float, usual: float, first: int
) -> tuple[float, float]:
    """See RecursiveRegression.observe. Returns that factor, and the usual error.

    Args:
        share: of the error that scales all coefficients.
        first: coefficients from this one on are kept at 0 or above.
    """
    count, predicted = len(row), 0.0
    for at in range(count):
        predicted += row[at] * coefficients[at]
    predicted = max(predicted, 0.1 * target)
    error = target / predicted - 1.0
    error = min(max(error, -CLIP * usual), CLIP * usual)
    scale = 1.0 + share * error
    gain, known = np.zeros(count), 0.0
    for at in range(count):
        for other in range(count):
            gain[at] += covariance[at, other] * row[other]
        gain[at] /= predicted * scale
        known += gain[at] * row[at] / (predicted * scale)
    # P - P x x' P / (1/e + x' P x) with e = f - (1 - f) / x' P x, rearranged so that e = 0 causes no division by 0.
    forgotten = FORGETTING * known - 1.0 + FORGETTING
    part = forgotten / (known * (1.0 + forgotten))
    step = ((1.0 + error) / scale - 1.0) / (1.0 + known)
    for at in range(count):
        coefficients[at] = coefficients[at] * scale + gain[at] * step
        if at >= first:
            coefficients[at] = max(coefficients[at], 0.0)
        for other in range(count):
            covariance[at, other] -= part * gain[at] * gain[other]
    return scale, max(usual + 0.05 * (abs(error) - usual), MIN_ERROR)


def isotonic_regression(values: Floats, weights: Floats) -> Floats:
    """The non-decreasing values nearest to `values` [n] in weighted least squares; weights [n] must be above 0.

    The method is pool adjacent violators (Ayer et al. 1955).
    """
    assert len(values) == len(weights)
    return _isotonic(values.copy(), weights.copy())


@compiled
def _isotonic(values: Floats, weights: Floats) -> Floats:
    """As isotonic_regression; both arrays are used up."""
    members, pools = np.ones(len(values), np.int64), 0
    for one in range(len(values)):
        value, weight, count = values[one], weights[one], 1
        while pools and values[pools - 1] > value:
            pools -= 1
            total = weights[pools] + weight
            value, weight = (values[pools] * weights[pools] + value * weight) / total, total
            count += members[pools]
        values[pools], weights[pools], members[pools] = value, weight, count
        pools += 1
    found, place = np.empty(len(members)), 0
    for pool in range(pools):
        found[place : place + members[pool]] = values[pool]
        place += members[pool]
    return found
