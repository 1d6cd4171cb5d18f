"""Statistics of benchmarks: interleaved repeats and intervals of ratios.

All variants run in one process, in an order that is drawn anew for each repeat: drifts of the machine fall on all
alike, and so does what the one before leaves in caches. In an order that was rotated, the policy behind plain decoding,
which has an engine of its own, was measured 3 to 5% slower than at other places.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from rlhfspec_mega.errors import UserError

CONFIDENCE = 0.95

Times = Mapping[str, Sequence[float]]  # variant -> one measurement per repeat


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval; `coverage` is what the interval guarantees, which may be under 0.95."""

    value: float
    low: float
    high: float
    coverage: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def interleaved(
    variants: Mapping[str, Callable[[], float]],
    repeats: int,
    warm_up: int = 1,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, list[float]]:
    """Measurements of every variant, one per repeat; a variant is a function that runs it once and returns its time.

    Args:
        warm_up: repeats before the first that counts.
        progress: is told the repeats done, after each that counts.
    """
    names = list(variants)
    found: dict[str, list[float]] = {name: [] for name in names}
    order = np.random.default_rng(0)
    for repeat in range(-warm_up, repeats):
        for name in order.permutation(names).tolist():
            measured = variants[name]()
            if repeat >= 0:
                found[name].append(measured)
        if repeat >= 0:
            progress(repeat + 1)
    return found


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Median of the paired ratios with `median_interval`. Raises UserError for unpaired or no measurements."""
    if len(numerators) != len(denominators):
        raise UserError(
            f"{len(numerators)} measurements cannot be paired with {len(denominators)}: repeat both equally often."
        )
    return median_interval([a / b for a, b in zip(numerators, denominators, strict=True)])


def median_interval(values: Sequence[float]) -> Interval:
    """Median with the interval that inverts the sign test: order statistics, no assumption on the distribution.

    The k-th smallest and k-th largest of n values enclose the median with probability 1 - 2 P(Binomial(n, 1/2) < k)
    (e.g. David & Nagaraja 2003, Order Statistics, 7.1). The largest k that reaches `CONFIDENCE` is taken; under six
    values none does, and the whole range is returned with its lower coverage.
    """
    if not values:
        raise UserError("There are no measurements to take a median of: run at least two repeats.")
    ordered, count = sorted(values), len(values)
    tail, k = 0.5**count, 1  # tail = P(Binomial(n, 1/2) < k)
    while 1 - 2 * (further := tail + math.comb(count, k) * 0.5**count) >= CONFIDENCE:
        tail, k = further, k + 1
    return Interval(statistics.median(ordered), ordered[k - 1], ordered[-k], max(0.0, 1 - 2 * tail))


def ratio_of_sums(numerators: ArrayLike, denominators: ArrayLike, *, draws: int = 2000, seed: int = 0) -> Interval:
    """sum(numerators) / sum(denominators) of sampled units, with the percentile bootstrap over units.

    E.g. tokens and steps of each sequence give tokens per step. Pairs of units are drawn together (Efron 1979).
    """
    top, bottom = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    chosen = _resampled(len(top), draws, seed)
    ratios = top[chosen].sum(axis=1) / bottom[chosen].sum(axis=1)
    low, high = np.quantile(ratios, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return Interval(float(top.sum() / bottom.sum()), float(low), float(high), CONFIDENCE)


def quotient_of_ratios(
    ours: tuple[ArrayLike, ArrayLike], rival: tuple[ArrayLike, ArrayLike], *, draws: int = 2000, seed: int = 0
) -> Interval:
    """`ratio_of_sums` of ours over that of a rival measured on the same units, bootstrapped as pairs."""
    sums = [np.asarray(values, np.float64) for values in (*ours, *rival)]
    chosen = _resampled(len(sums[0]), draws, seed)
    a, b, c, d = (values[chosen].sum(axis=1) for values in sums)
    low, high = np.quantile(a / b / (c / d), ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    a_all, b_all, c_all, d_all = (float(values.sum()) for values in sums)
    return Interval(a_all / b_all / (c_all / d_all), float(low), float(high), CONFIDENCE)


def _resampled(count: int, draws: int, seed: int) -> np.ndarray:
    """Indices [draws, count] of units drawn with replacement."""
    if count < 1:
        raise UserError("There are no measurements to resample: measure at least one sequence.")
    return np.random.default_rng(seed).integers(count, size=(draws, count))
