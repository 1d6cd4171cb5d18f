"""Sums of table entries as log-odds: the compiled functions of `planning.acceptance`."""

from __future__ import annotations

import math

import numpy as np

from rlhfspec_mega.compiled import compiled
from rlhfspec_mega.planning.tree import Bools, Floats, Ints

MIN_PROBABILITY = 1e-3  # smallest distance of a probability from 0 and 1
MAX_LOG_ODDS = 8.0  # bound of an entry, so that one that was never wrong still adapts when this changes


@compiled
def probabilities_of(log_odds: Floats, entries: Ints) -> Floats:
    """[k] probabilities, `MIN_PROBABILITY` away from 0 and 1, whose log-odds are sums of entries [factors, k]."""
    found = np.empty(entries.shape[1])
    for node in range(len(found)):
        total = 0.0
        for factor in range(entries.shape[0]):
            total += log_odds[entries[factor, node]]
        found[node] = min(max(1.0 / (1.0 + math.exp(-total)), MIN_PROBABILITY), 1.0 - MIN_PROBABILITY)
    return found


@compiled
def learn(
    log_odds: Floats,
    information: Floats,
    most: Floats,
    sums: Floats,
    entries: Ints,
    accepted: Bools,
    expected: Floats,
    fixed: int,
) -> None:
    """Move entries [factors, k] towards the outcomes [k] of which these probabilities were expected, in place.

    Args:
        information, most: of each entry, gathered so far and at most.
        sums: [3, len(log_odds)] a buffer: all 0, and again afterwards.
        fixed: the entry that stays.
    """
    gradient, curvature, damping = sums[0], sums[1], sums[2]
    for node in range(len(accepted)):
        difference, spread = accepted[node] - expected[node], expected[node] * (1.0 - expected[node])
        active = 0
        for factor in range(entries.shape[0]):
            active += entries[factor, node] != fixed
        for factor in range(entries.shape[0]):
            entry = entries[factor, node]
            if entry != fixed:
                gradient[entry] += difference
                curvature[entry] += spread
                damping[entry] += active * spread
    for node in range(len(accepted)):
        for factor in range(entries.shape[0]):
            entry = entries[factor, node]
            if damping[entry] > 0.0:
                moved = log_odds[entry] + gradient[entry] / (information[entry] + damping[entry])
                log_odds[entry] = min(max(moved, -MAX_LOG_ODDS), MAX_LOG_ODDS)
                information[entry] = min(information[entry] + curvature[entry], most[entry])
                gradient[entry] = curvature[entry] = damping[entry] = 0.0  # other nodes may have the same entry
