"""How well predicted acceptance of draft tokens agrees with the outcomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


class Calibration:
    """Running sums behind a `CalibrationReport`."""

    def __init__(self) -> None:
        self._observations = 0
        self._bins = np.zeros((3, BINS))  # decayed sums by bin: observations, predictions, accepted
        self._steps = np.zeros(3)  # sums: steps, predicted and realised accepted draft tokens
        self._recent = np.zeros(3)  # the same sums, decayed

    def add(self, conditional: Floats, accepted: Bools, predicted_tokens: float, accepted_tokens: int) -> None:
        """Add a step: predictions and outcomes of nodes whose parent was accepted, and total accepted tokens."""
        self._observations += len(conditional)
        _add_to_bins(self._bins, conditional, accepted)
        _add_step(self._steps, self._recent, predicted_tokens, float(accepted_tokens))

    def report(self) -> CalibrationReport:
        """The current report; all values are 0 before the first step."""
        error = float(np.abs(self._bins[1] - self._bins[2]).sum()) / max(float(self._bins[0].sum()), 1e-9)
        steps, recent = self._steps / max(self._steps[0], 1e-9), self._recent / max(self._recent[0], 1e-9)
        return CalibrationReport(
            self._observations, error, float(steps[1]), float(steps[2]), float(recent[1]), float(recent[2])
        )

    def state_dict(self) -> dict[str, Any]:
        sums = {"bins": self._bins.tolist(), "steps": self._steps.tolist(), "recent": self._recent.tolist()}
        return {"observations": self._observations, **sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._observations = state["observations"]
        self._bins, self._steps = np.array(state["bins"]), np.array(state["steps"])
        self._recent = np.array(state["recent"])


@compiled
def _add_to_bins(bins: Floats, conditional: Floats, accepted: Bools) -> None:
    bins *= NODES_DECAY
    for node in range(len(conditional)):
        own = min(int(conditional[node] * BINS), BINS - 1)
        bins[0, own] += 1.0
        bins[1, own] += conditional[node]
        bins[2, own] += accepted[node]


@compiled
def _add_step(steps: Floats, recent: Floats, predicted: float, realised: float) -> None:
    recent *= STEPS_DECAY
    for sums in (steps, recent):
        sums[0] += 1.0
        sums[1] += predicted
        sums[2] += realised
