"""How well predicted acceptance of draft tokens agrees with the outcomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rlhfspec_mega.compiled import compiled
from rlhfspec_mega.planning.tree import Bools, Floats

BINS = 10  # of probability, of equal width
STEPS_DECAY = 0.99  # factor per step on the weight of earlier steps in a report's recent means
NODES_DECAY = 0.999  # the same in its calibration error


@dataclass(frozen=True)
class CalibrationReport:
    """How well predicted acceptance agrees with the outcomes.

    Attributes:
        observations: verified nodes whose parent was accepted.
        calibration_error: expected calibration error over about the last 1000 steps, from 0 to 1: the mean over these
            nodes of |predicted - observed frequency| in the node's probability bin.
        predicted, realised: mean accepted draft tokens per step with drafting.
        recent_predicted, recent_realised: the same over about the last 100 steps.
    """

    observations: int
    calibration_error: float
    predicted: float
    realised: float
    recent_predicted: float
    recent_realised: float


class Sums(NamedTuple):
    """Running sums of predictions and outcomes.

    Attributes:
        bins: [3, BINS] decayed, by bin: observations, predictions, accepted.
        steps: steps, predicted and realised accepted draft tokens, observations.
        recent: the first three of these, decayed.
    """

    bins: Floats
    steps: Floats
    recent: Floats


class Calibration:
    """The sums behind a `CalibrationReport`, to which `add_outcomes` adds steps."""

    def __init__(self) -> None:
        self.sums = Sums(np.zeros((3, BINS)), np.zeros(4), np.zeros(3))

    def report(self) -> CalibrationReport:
        """The current report; all values are 0 before the first step."""
        bins, steps, recent = self.sums
        error = float(np.abs(bins[1] - bins[2]).sum()) / max(float(bins[0].sum()), 1e-9)
        (_, predicted, realised), observations = steps[:3] / max(steps[0], 1e-9), int(steps[3])
        _, recent_predicted, recent_realised = (recent / max(recent[0], 1e-9)).tolist()
        return CalibrationReport(
            observations, error, float(predicted), float(realised), recent_predicted, recent_realised
        )

    def state_dict(self) -> dict[str, Any]:
        bins, steps, recent = (sums.tolist() for sums in self.sums)
        return {"observations": int(steps[3]), "bins": bins, "steps": steps[:3], "recent": recent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        steps = np.array([*state["steps"], state["observations"]], float)
        self.sums = Sums(np.array(state["bins"]), steps, np.array(state["recent"]))


@compiled
def add_outcomes(sums: Sums, conditional: Floats, accepted: Bools, predicted: float) -> None:
    """Add a step.

    Args:
        conditional, accepted: predictions and outcomes of nodes whose parent was accepted.
        predicted: accepted draft tokens.
    """
    bins, steps, recent = sums
    bins *= NODES_DECAY
    for node in range(len(conditional)):
        own = min(int(conditional[node] * BINS), BINS - 1)
        bins[0, own] += 1.0
        bins[1, own] += conditional[node]
        bins[2, own] += accepted[node]
    recent *= STEPS_DECAY
    realised = float(accepted.sum())
    for each in (steps, recent):
        each[0] += 1.0
        each[1] += predicted
        each[2] += realised
    steps[3] += len(conditional)
