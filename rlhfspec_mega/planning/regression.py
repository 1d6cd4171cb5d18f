"""Regressions: linear on relative errors, refined observation by observation, and isotonic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhfspec_mega.planning.tree import Floats

FORGETTING = 0.98  # of what is known along the direction just observed
COMMON = 0.05  # share of an error by which all coefficients move together
CLIP = 3.0  # errors are cut at so many times their usual size
USUAL = 1.0  # size of errors before anything is known: nothing is clipped
LEAST_USUAL, MOST_FITTED = 0.01, 0.05  # bounds of the usual error, always and after a fit


class RecursiveRegression:
    """y ~ row @ coefficients, every error taken relative to the prediction: y spans orders of magnitude.

    An observation moves the coefficients in two ways. A small share of its error scales all of them: a machine that
    is slower today is slower everywhere, not only where it was seen. The rest enters recursive least squares with
    directional forgetting (Kulhavy and Karny, IFAC 1984): the covariance P changes along P x only, and towards
    x' P x = (1 - f) / f, where it rests. So what is not seen again is never forgotten, and P stays at or below the
    larger of its value after `fit` and that bound: it cannot wind up, however long a run stays at one size.

    Errors beyond `CLIP` times the usual one are cut there (Huber's rule); their usual size follows the cut errors, so
    a lasting change opens the clip within some ten observations while a descheduled process does not.
    """

    def __init__(self, coefficients: Floats, covariance: Floats, nonnegative: slice) -> None:
        """`nonnegative` coefficients are kept at 0 or above."""
        self.coefficients: Floats = coefficients.astype(np.float64)
        self._covariance: Floats = covariance.astype(np.float64)
        self._nonnegative = nonnegative
        self._usual = USUAL
        self._count = 0

    def fit(self, rows: Floats, targets: Floats, prior: Floats) -> None:
        """Least squares of relative errors: rows [n, k], targets [n] above 0, prior information [k, k]."""
        scaled = rows / targets[:, None]
        information = scaled.T @ scaled + prior
        wanted = scaled.sum(axis=0)
        free = np.ones(len(wanted), np.bool_)
        bounded = np.zeros(len(wanted), np.bool_)
        bounded[self._nonnegative] = True
        coefficients: Floats = np.zeros(len(wanted))
        while True:  # leave out what would turn negative: at most as many rounds as bounded coefficients
            coefficients[free] = np.linalg.solve(information[np.ix_(free, free)], wanted[free])
            negative = free & bounded & (coefficients < 0)
            if not negative.any():
                break
            free &= ~negative
            coefficients[negative] = 0.0
        self.coefficients = coefficients
        self._covariance = np.linalg.inv(information).astype(np.float64)
        errors = np.abs(scaled @ coefficients - 1.0)
        self._usual = float(np.clip(np.median(errors), LEAST_USUAL, MOST_FITTED))
        self._count = len(targets)

    @property
    def variances(self) -> Floats:
        """Of the coefficients: large for those that little is known of."""
        return self._covariance.diagonal()

    def observe(self, row: Floats, target: float) -> None:
        """Learn that this row, some entry of it above 0, came to `target` (above 0)."""
        self._count += 1
        coefficients = self.coefficients
        predicted = max(float(row @ coefficients), 0.1 * target)
        error = self._clipped(target / predicted - 1.0)
        scale = 1.0 + max(COMMON, 1.0 / self._count) * error  # at first nothing is known but the shape
        coefficients *= scale
        x = row * (1.0 / (predicted * scale))
        gain = self._covariance @ x
        known = float(x @ gain)
        coefficients += gain * (((1.0 + error) / scale - 1.0) / (1.0 + known))
        # P - P x x' P / (1/e + x' P x) with e = f - (1 - f) / x' P x, multiplied out so that e = 0 divides nothing.
        share = FORGETTING * known - 1.0 + FORGETTING
        self._covariance -= (gain * (share / (known * (1.0 + share)))) * gain[:, None]
        for at in range(len(coefficients))[self._nonnegative]:
            if coefficients[at] < 0.0:
                coefficients[at] = 0.0

    def _clipped(self, error: float) -> float:
        limit = CLIP * self._usual
        cut = min(max(error, -limit), limit)
        self._usual = max(self._usual + 0.05 * (abs(cut) - self._usual), LEAST_USUAL)
        return cut

    def state_dict(self) -> dict[str, Any]:
        """All that was learnt, as plain data."""
        return {
            "coefficients": self.coefficients.tolist(),
            "covariance": self._covariance.tolist(),
            "usual": self._usual,
            "count": self._count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.coefficients = np.array(state["coefficients"])
        self._covariance = np.array(state["covariance"])
        self._usual, self._count = state["usual"], state["count"]


def rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest values in weighted least squares that never fall: pool adjacent violators (Ayer et al. 1955).

    Weights are above 0.
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
