"""Isotonic regression: the nearest values that never fall."""

from __future__ import annotations

from collections.abc import Sequence


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
