"""The shortest makespan of a small rollout over all assignments, by brute force and event by event."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import product

import numpy as np

from rlhfspec_mega.planning.rollout_state import EngineState, MigrationCost, RolloutState


def drained(engine: EngineState, remaining: Sequence[float]) -> float:
    """Seconds until an engine has decoded all of at most `slots` samples, from one end to the next."""
    assert len(remaining) <= engine.slots
    left, seconds = sorted(remaining), 0.0
    curve = engine.throughput
    while left:
        pace = float(np.interp(len(left), curve.batches, curve.seconds))
        seconds += left[0] * pace
        left = [tokens - left[0] for tokens in left[1:]]
    return seconds


def end_of(state: RolloutState, cost: MigrationCost, index: int, here: Collection[int]) -> float:
    """Seconds until an engine is done if it has these samples now; inf if slots or KV do not hold what it takes."""
    engine = state.engines[index]
    home = set(np.flatnonzero(state.at == index).tolist())
    came, left = set(here) - home, home - set(here)
    final = sum(float(state.lengths[i] + state.remaining[i]) for i in here)
    if came and (len(here) > engine.slots or final > engine.kv_tokens):
        return float("inf")
    copied = [i for i in came | left if state.generated[i] > 0]
    seconds = drained(engine, [float(state.remaining[i]) for i in here])
    seconds += cost.per_token * sum(int(state.lengths[i]) for i in copied)
    return seconds + (cost.downtime if came & set(copied) else 0.0)


def makespan(state: RolloutState, cost: MigrationCost, to: Sequence[int]) -> float:
    """Seconds until all samples are done if they go to engines `to` now; inf if they do not fit."""
    here = [[i for i, place in enumerate(to) if place == index] for index in range(len(state.engines))]
    return max(end_of(state, cost, index, samples) for index, samples in enumerate(here))


def shortest(state: RolloutState, cost: MigrationCost) -> float:
    """The least makespan over all assignments of movable samples; for about 7 samples and 3 engines."""
    everywhere = range(len(state.engines))
    choices = [everywhere if free else (home,) for free, home in zip(state.movable, state.at.tolist(), strict=True)]
    assignments = np.array(list(product(*choices)))
    bits = 1 << np.arange(len(choices))
    ends = []  # of each engine, by assignment
    for index in everywhere:
        sets, which = np.unique((assignments == index) @ bits, return_inverse=True)
        members = [np.flatnonzero(each & bits).tolist() for each in sets]
        ends.append(np.array([end_of(state, cost, index, here) for here in members])[which])
    return float(np.max(ends, axis=0).min())
