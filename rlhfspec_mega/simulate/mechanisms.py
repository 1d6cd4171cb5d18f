"""The mechanisms that the simulation compares, and the planning objects that each of them uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlhfspec_mega.planning.reallocation import Reallocator
from rlhfspec_mega.planning.tail import Consolidator, TailPolicy
from rlhfspec_mega.simulate.curves import CostCurves
from rlhfspec_mega.simulate.rollout import Rollout, SimulatedRollout
from rlhfspec_mega.simulate.scoring import Scoring
from rlhfspec_mega.simulate.workload import Learned, Oracle, Predictions, Workload, start_places


@dataclass(frozen=True)
class Mechanism:
    """The mechanisms that a rollout uses.

    Attributes:
        queued: an engine begins with as many samples as it has slots, and takes others as they end.
        moves: samples are reallocated.
        fuses: the long tail is consolidated, and freed engines score finished samples (inter-stage fusion).
        drafts: engines draft adaptively.
    """

    queued: bool = False
    moves: bool = False
    fuses: bool = False
    drafts: bool = False


_UNDRAFTED = {
    "static": Mechanism(),
    "queue": Mechanism(queued=True),
    "reallocation": Mechanism(queued=True, moves=True),
    "reallocation+fusion": Mechanism(queued=True, moves=True, fuses=True),
}
MECHANISMS = _UNDRAFTED | {
    f"{name}+drafting": Mechanism(mechanism.queued, mechanism.moves, mechanism.fuses, drafts=True)
    for name, mechanism in _UNDRAFTED.items()
}


def simulate(
    mechanism: Mechanism,
    workload: Workload,
    engines: int,
    curves: CostCurves,
    *,
    start: str,
    plan_seconds: float,
    earlier: Sequence[Workload] | None,
    least_gain: float = 0.1,
    cool_down: float = 1.0,
) -> SimulatedRollout:
    """Simulate one rollout.

    Args:
        start: see `start_places`.
        plan_seconds: simulated seconds between two plans.
        earlier: rollouts from which lengths are predicted, besides this one; None: policies know the true lengths.
        least_gain, cool_down: see `Reallocator`.

    Raises ValueError for drafting if `curves` has no curve with drafting.
    """
    curve = curves.drafting if mechanism.drafts else curves.plain
    if curve is None:
        raise ValueError(f"{curves.name} has no curve with drafting")
    places = start_places(workload, engines, start)
    predictions: Predictions = Oracle(workload) if earlier is None else Learned(workload, earlier)
    scoring = Scoring(engines, workload.totals, curves.scoring_seconds, curves.scoring_start, mechanism.fuses)
    policy = None
    if mechanism.moves:
        cost = replace(curves.migration.cost, prefill=curves.prefill_seconds)
        reallocator = Reallocator(cost, least_gain=least_gain, cool_down=cool_down)
        consolidator = Consolidator(cost) if mechanism.fuses else None
        policy = TailPolicy(reallocator, consolidator, scoring.work_seconds)
    return Rollout(
        workload, engines, curves, curve, places, mechanism.queued, policy, predictions, scoring, plan_seconds
    ).run()
