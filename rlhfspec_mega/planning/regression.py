"""Recursive linear regression on relative errors, and isotonic regression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

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

    def __init__(self, coefficients: Floats, covariance: Floats, nonnegative: slice) -> None:
        """`nonnegative` coefficients are kept at 0 or above."""
        self.coefficients: Floats = coefficients.astype(np.float64)
        self._covariance: Floats = covariance.astype(np.float64)
        self._nonnegative = nonnegative
        self._usual_error = INITIAL_ERROR
        self._count = 0

    def fit(self, rows: Floats, targets: Floats, prior: Floats) -> None:
        """Least squares of relative errors: rows [n, k], targets [n] above 0, prior information [k, k]."""
        scaled = rows / targets[:, None]
        information = scaled.T @ scaled + prior
        moments = scaled.sum(axis=0)
        free = np.ones(len(moments), np.bool_)
        bounded = np.zeros(len(moments), np.bool_)
        bounded[self._nonnegative] = True
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
        coefficients = self.coefficients
        predicted = max(float(row @ coefficients), 0.1 * target)
        error = self._clipped(target / predicted - 1.0)
        scale = 1.0 + max(COMMON_SHARE, 1.0 / self._count) * error  # the first observations mostly set the scale
        coefficients *= scale
        x = row * (1.0 / (predicted * scale))
        gain = self._covariance @ x
        known = float(x @ gain)
        coefficients += gain * (((1.0 + error) / scale - 1.0) / (1.0 + known))
        # P - P x x' P / (1/e + x' P x) with e = f - (1 - f) / x' P x, rearranged so that e = 0 causes no division by 0.
        share = FORGETTING * known - 1.0 + FORGETTING
        self._covariance -= (gain * (share / (known * (1.0 + share)))) * gain[:, None]
        for at in range(len(coefficients))[self._nonnegative]:
            if coefficients[at] < 0.0:
                coefficients[at] = 0.0
        return scale

    def _clipped(self, error: float) -> float:
        limit = CLIP * self._usual_error
        cut = min(max(error, -limit), limit)
        self._usual_error = max(self._usual_error + 0.05 * (abs(cut) - self._usual_error), MIN_ERROR)
        return cut

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


def isotonic_regression(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing values nearest to `values` in weighted least squares; weights must be above 0.

    The method is pool adjacent violators (Ayer et al. 1955).
    """
    pools: list[tuple[float, float, int]] = []  # mean, weight, members
    for value, weight in zip(values, weights, strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            mean, heavy, members = pools.pop()
            total = heavy + pool[1]
            pool = ((mean * heavy + pool[0] * pool[1]) / total, total, members + pool[2])
        pools.append(pool)
    return [mean for mean, _, members in pools for _ in range(members)]
