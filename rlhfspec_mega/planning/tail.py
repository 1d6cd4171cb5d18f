"""The policy of a rollout that balances engines while they are full and packs the long tail."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlhfspec_mega.planning.consolidation import Consolidator
from rlhfspec_mega.planning.reallocation import Reallocator
from rlhfspec_mega.planning.rollout_state import MigrationCost, Plan, RolloutState


class TailPolicy:
    """Sample reallocation; when that has nothing to gain, consolidation. Implements `RolloutPolicy`.

    `Plan.freed` names all engines freed in this rollout so far, by their indices in the state given. Nothing moves to
    them. One that has samples all the same takes part again: a move from it came to nothing, or it was given those of
    an engine that died; and so do all if no other engine is left.

    Args:
        reallocator, consolidator: None switches it off.
        work_seconds: device-seconds of inference tasks on this rollout's samples that are still to be done, on those
            that have ended and those that have not; asked at every plan.
    """

    def __init__(
        self,
        reallocator: Reallocator | None,
        consolidator: Consolidator | None = None,
        work_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._reallocator, self._consolidator, self._work_seconds = reallocator, consolidator, work_seconds
        self._freed: set[int] = set()  # ranks: indices change when an engine dies

    def learn_cost(self, cost: MigrationCost) -> None:
        """What a move costs, as known now."""
        for part in (self._reallocator, self._consolidator):
            if part:
                part.cost = cost

    def begin(self) -> None:
        """A new rollout begins: all engines serve."""
        self._freed.clear()
        if self._reallocator:
            self._reallocator.begin()
        if self._consolidator:
            self._consolidator.begin()

    def plan(self, state: RolloutState) -> Plan:
        """Moves of now, and all engines freed so far."""
        self._freed -= {state.engines[i].rank for i in np.unique(state.at)}
        freed = tuple(i for i, engine in enumerate(state.engines) if engine.rank in self._freed)
        if len(freed) == len(state.engines):
            self._freed.clear()
            freed = ()
        work_seconds = self._work_seconds()
        if self._consolidator:
            self._consolidator.observe(len(state.ids), work_seconds)
        if self._reallocator and (moves := self._reallocator.plan(state, freed)):
            return Plan(moves, freed)
        if self._consolidator and (plan := self._consolidator.plan(state, freed, work_seconds)):
            self._freed |= {state.engines[i].rank for i in plan.freed}
            return plan
        return Plan((), freed)
