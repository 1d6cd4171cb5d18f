"""Gains of ways to make a step, as they were measured: the arrays and compiled functions of `planning.modes`."""

from __future__ import annotations

import math
from typing import NamedTuple

from rlhfspec_mega.compiled import compiled
from rlhfspec_mega.planning.tree import Bools, Floats
from rlhfspec_mega.types import DECODE_MODES

# A plain step; one with draft tokens from history; one for which the draft model runs, too. See DECODE_MODES.
PLAIN, RECALLED, DRAFTED = range(len(DECODE_MODES))

FORECAST_WEIGHT = 6.0  # plain steps' time for which a forecast counts beside what was measured
MEMORY = 250.0  # plain steps' time after which what was measured counts a third
MOST_WORK = 4.0  # times the mode's usual work: a step that takes longer was interrupted

# Gain of drafting below which it is not expected to pay again; and the share of a rollout's time that it has to save,
# once it is known how long batches of each size last: to follow samples takes 1 to 4% of plain steps.
FOLLOWED_GAIN, FOLLOWED_SAVING = 0.97, 0.015


class Gains(NamedTuple):
    """What is known of the gains of modes. Pairs are sums of tokens and of time, both in those of plain steps.

    Attributes:
        measured: [batch buckets, modes, 2] in which older steps count less.
        overall: [modes, 2] the same of all buckets together.
        tally: [batch buckets, modes, 2] in which all steps count alike.
        forecast: [batch buckets] of drafting, when last looked at; 0 if it never was.
        forecast_kept: [2] what drafting gave, and what was forecast for it.
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
        usual, pace = gains.overall[mode], 1.0
        if usual[0] > FORECAST_WEIGHT:
            pace = max(pace, usual[1] / usual[0])
        learn_gain(gains, bucket, mode, tokens, min(work, MOST_WORK * tokens * pace))


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
def worth_following(gains: Gains, came: Bools, kept: float, shares: Floats) -> bool:
    """See ModeChoice.follows; the arrays are by bucket, up to that of the batch.

    Args:
        came: whether drafting was looked at for batches of this size.
        kept: of gains in whole rollouts.
        shares: of the time; all 0 if they are not known yet.
    """
    saved, pays, kept_of_forecasts = 0.0, False, gains.forecast_kept[0] / gains.forecast_kept[1]
    for bucket in range(len(came)):
        forecast = gains.forecast[bucket]
        if forecast == 0.0:
            return True
        # At sizes that never came the forecast has the benefit of the doubt: what others kept is left out.
        expected = forecast * (kept_of_forecasts if came[bucket] else 1.0)
        tokens, work = gains.measured[bucket, DRAFTED]
        gain = kept * (tokens + FORECAST_WEIGHT * expected) / (work + FORECAST_WEIGHT)
        pays |= gain >= FOLLOWED_GAIN
        saved += shares[bucket] * (1.0 - 1.0 / max(gain, 1.0))
    return saved >= FOLLOWED_SAVING * shares.sum() if shares.any() else pays
