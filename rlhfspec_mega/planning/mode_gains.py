"""Gains of ways to make a step, as they were measured: the arrays and compiled functions of `planning.modes`."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from rlhfspec_mega.compiled import compiled
from rlhfspec_mega.planning.tree import Bools, Floats, Ints
from rlhfspec_mega.types import BATCH_BUCKETS, DECODE_MODES

# A plain step; one with draft tokens from history; one for which the draft model runs, too. See DECODE_MODES.
PLAIN, RECALLED, DRAFTED = range(len(DECODE_MODES))

FORECAST_WEIGHT = 6.0  # plain steps' time for which a forecast counts beside what was measured
MEMORY = 250.0  # plain steps' time after which what was measured counts a third
MOST_WORK = 4.0  # times the mode's usual work: a step that takes longer was interrupted

# Gain of drafting, over plain steps as they are, below which it is not expected to pay again; and the share of a
# rollout's time that it has to save, once it is known how long batches of each size last: to follow samples takes 1 to
# 4% of plain steps.
FOLLOWED_GAIN, FOLLOWED_SAVING = 0.97, 0.015


class Gains(NamedTuple):
    """What is known of the gains of modes. Pairs are sums of tokens and of time, both in those of plain steps.

    Attributes:
        measured: [batch buckets, modes, 2] in which older steps count less.
        overall: [modes, 2] the same of all buckets together.
        tally: [batch buckets, modes, 2] in which all steps count alike.
        forecast: [batch buckets] of drafting, when last looked at; 0 if it never was.
        forecast_kept: [2] what drafting gave, and what was forecast for it; see `kept_of_forecasts`.
    """

    measured: Floats
    overall: Floats
    tally: Floats
    forecast: Floats
    forecast_kept: Floats


@compiled
def add_step(gains: Gains, bucket: int, mode: int, tokens: float, work: float, learns: bool) -> None:
    """Add a step that took the time of `work` plain ones and gave the tokens of so many."""
    gains.tally[bucket, mode, 0] += tokens
    gains.tally[bucket, mode, 1] += work
    if learns:
        learn_gain(gains, bucket, mode, tokens, min(work, most_work(gains, mode, tokens)))


@compiled
def most_work(gains: Gains, mode: int, tokens: float) -> float:
    """Time, in that of plain steps, above which a step that gave so many tokens was interrupted."""
    usual, pace = gains.overall[mode], 1.0
    if usual[0] > FORECAST_WEIGHT:
        pace = max(pace, usual[1] / usual[0])
    return float(MOST_WORK * tokens * pace)


@compiled
def learn_rests(
    gains: Gains, sizes: Ints, plain: Floats, settled: Bools, counts: Ints, seconds: Floats
) -> tuple[Floats, float]:
    """Add rows of plain steps; gains are learnt from settled ones, of each bucket together.

    Args:
        sizes, plain: [rows] samples of a batch, and seconds of a plain step of it.
        settled: [rows] whether the steps before were plain, too.
        counts: [rows] steps of each.
        seconds: of all steps, row by row.

    Returns:
        [rows] seconds of each, and the seconds of all, in which no step counts as more than MOST_WORK plain ones: one
        that takes longer was interrupted.
    """
    took, learnt = np.zeros(len(sizes)), np.zeros((len(gains.measured), 2))
    place, all_usual = 0, 0.0
    for row in range(len(sizes)):
        bucket, usual = bucket_of(sizes[row]), 0.0
        for _ in range(counts[row]):
            took[row] += seconds[place]
            usual += min(seconds[place], MOST_WORK * plain[row])
            place += 1
        gains.tally[bucket, PLAIN, 0] += counts[row]
        gains.tally[bucket, PLAIN, 1] += took[row] / plain[row]
        if settled[row]:
            learnt[bucket, 0] += counts[row]
            learnt[bucket, 1] += usual / plain[row]
        all_usual += usual
    for bucket in range(len(learnt)):
        if learnt[bucket, 0]:
            learn_gain(gains, bucket, PLAIN, learnt[bucket, 0], learnt[bucket, 1])
    return took, all_usual


@compiled
def bucket_of(size: int) -> int:
    """As `types.batch_bucket`."""
    bucket = 0
    while bucket < BATCH_BUCKETS - 1 and size > 1 << bucket:
        bucket += 1
    return bucket


@compiled
def learn_gain(gains: Gains, bucket: int, mode: int, tokens: float, work: float) -> None:
    """Add tokens and time, both in those of plain steps, to what gains are taken from."""
    older = math.exp(-work / MEMORY)
    _decay_and_add(gains.measured[bucket, mode], older, tokens, work)
    _decay_and_add(gains.overall[mode], older, tokens, work)
    if mode == DRAFTED and gains.forecast[bucket] > 0.0:
        _decay_and_add(gains.forecast_kept, older, tokens, work * gains.forecast[bucket])


@compiled
def _decay_and_add(sums: Floats, older: float, tokens: float, work: float) -> None:
    sums[0] = sums[0] * older + tokens
    sums[1] = sums[1] * older + work


@compiled
def overall_gain(gains: Gains, mode: int) -> float:
    """Of a mode at all batch sizes; about 1 while little is known."""
    tokens, work = gains.overall[mode]
    return float((tokens + FORECAST_WEIGHT) / (work + FORECAST_WEIGHT))


@compiled
def kept_of_forecasts(gains: Gains) -> float:
    """The share of its forecast that drafting keeps.

    While little is known it is that of plain steps: where they take longer than predicted, others will, too.
    """
    gave, forecast = gains.forecast_kept
    return float((gave + FORECAST_WEIGHT * overall_gain(gains, PLAIN)) / (forecast + FORECAST_WEIGHT))


@compiled
def worth_following(gains: Gains, came: Bools, kept: float, shares: Floats) -> bool:
    """See ModeChoice.follows; the arrays are by bucket, up to that of the batch.

    Args:
        came: whether drafting was looked at for batches of this size.
        kept: of gains in whole rollouts.
        shares: of the time; all 0 if they are not known yet.
    """
    saved, pays, kept_here = 0.0, False, kept_of_forecasts(gains)
    for bucket in range(len(came)):
        forecast = gains.forecast[bucket]
        if forecast == 0.0:
            return True
        # At sizes that never came the forecast has the benefit of the doubt: what others kept is left out.
        expected = forecast * (kept_here if came[bucket] else 1.0)
        tokens, work = gains.measured[bucket, DRAFTED]
        gain = kept * (tokens + FORECAST_WEIGHT * expected) / (work + FORECAST_WEIGHT) / overall_gain(gains, PLAIN)
        pays |= gain >= FOLLOWED_GAIN
        saved += shares[bucket] * (1.0 - 1.0 / max(gain, 1.0))
    return saved >= FOLLOWED_SAVING * shares.sum() if shares.any() else pays
