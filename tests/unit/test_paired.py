"""Statistics of benchmarks against textbook tables and distributions whose parameters are known."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.paired import (
    interleaved,
    median_interval,
    quotient_of_ratios,
    ratio_interval,
    ratio_of_sums,
)
from rlhfspec_mega.errors import UserError


def test_variants_are_interleaved_and_each_follows_each_equally_often():
    calls: list[str] = []

    def variant(name: str):
        def run() -> float:
            calls.append(name)
            return float(len(calls))

        return run

    repeats = 600
    found = interleaved({name: variant(name) for name in "abc"}, repeats)
    rounds = [calls[at : at + 3] for at in range(0, len(calls), 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds), "each once per repeat"
    assert len(rounds) == 1 + repeats, "the first one is for warming up"
    for name, measured in found.items():
        assert measured == [float(calls.index(name, at) + 1) for at in range(3, len(calls), 3)]
    pairs = Counter(pairwise(calls))
    followed = [pairs[one, other] for one in "abc" for other in "abc" if one != other]
    assert max(followed) < 1.3 * min(followed)


@pytest.mark.parametrize(("count", "rank"), [(6, 1), (8, 1), (9, 2), (12, 3), (15, 4), (20, 6), (25, 8), (30, 10)])
def test_order_statistics_of_the_sign_test(count: int, rank: int):
    values = [float(v) for v in np.random.default_rng(0).permutation(count) + 1]
    interval = median_interval(values)
    assert (interval.low, interval.high) == (rank, count + 1 - rank)
    assert interval.value == (count + 1) / 2
    assert 0.95 <= interval.coverage < 1


@pytest.mark.parametrize(("count", "coverage"), [(1, 0.0), (2, 0.5), (3, 0.75), (5, 0.9375)])
def test_few_repeats_say_how_little_they_cover(count: int, coverage: float):
    interval = median_interval([float(i) for i in range(count)])
    assert (interval.low, interval.high, interval.coverage) == (0.0, count - 1.0, pytest.approx(coverage))


def test_coverage_is_that_of_simulation():
    rng = np.random.default_rng(1)
    intervals = [median_interval(list(rng.lognormal(0.0, 1.0, 11))) for _ in range(4000)]
    hit = np.mean([interval.low <= 1.0 <= interval.high for interval in intervals])
    assert hit == pytest.approx(intervals[0].coverage, abs=0.015)


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=30), st.floats(0.5, 2.0))
def test_a_constant_factor_is_found_exactly(times: list[float], factor: float):
    interval = ratio_interval([factor * time for time in times], times)
    assert interval.value == pytest.approx(factor)
    assert interval.low == pytest.approx(factor) and interval.high == pytest.approx(factor)


def test_a_drift_common_to_both_cancels_in_pairs():
    drift = np.linspace(1.0, 5.0, 12)
    interval = ratio_interval(list(2.0 * drift), list(drift))
    assert interval.high - interval.low < 1e-12


def test_bootstrap_of_a_ratio_of_sums_covers_the_truth():
    rng = np.random.default_rng(2)
    hits, widths = 0, []
    for trial in range(200):
        steps = rng.poisson(20.0, 40) + 1.0
        tokens = steps * 3.0 + rng.normal(0.0, 8.0, 40)
        interval = ratio_of_sums(tokens, steps, draws=400, seed=trial)
        assert interval.value == pytest.approx(tokens.sum() / steps.sum())
        hits += interval.low <= 3.0 <= interval.high
        widths.append(interval.high - interval.low)
    assert 0.88 <= hits / 200 <= 0.99
    # delta method: sd = 8 / (mean steps * sqrt(units))
    assert np.mean(widths) == pytest.approx(2 * 1.96 * 8.0 / (21.0 * 40**0.5), rel=0.15)


def test_quotient_pairs_units():
    rng = np.random.default_rng(3)
    tokens = rng.uniform(10.0, 1000.0, 30)  # units differ widely, yet ours takes half the steps in each
    quotient = quotient_of_ratios((tokens, tokens / 4), (tokens, tokens / 2))
    assert quotient.value == pytest.approx(2.0)
    assert quotient.low == pytest.approx(2.0) and quotient.high == pytest.approx(2.0)


def test_what_cannot_be_judged_is_refused():
    with pytest.raises(UserError, match="cannot be paired"):
        ratio_interval([1.0, 2.0], [1.0])
    with pytest.raises(UserError, match="no measurements"):
        median_interval([])
    with pytest.raises(UserError, match="no measurements"):
        ratio_of_sums([], [])
