"""How far predicted acceptance is from what happens, from predictions made before the outcome was learnt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhfspec_mega.planning.tree import Bools, Floats

BINS = 10  # of probability, of equal width
RECENT = 0.99  # share of a step's weight that the next step leaves
RECENT_NODES = 0.999  # the same in the bins of nodes


@dataclass(frozen=True)
class CalibrationReport:
    """Attributes:
    observations: nodes whose parent was accepted, so far.
    calibration_error: expected calibration error: the mean over such nodes of about the last 1000 steps of |predicted -
        observed frequency| of the node's probability bin, 0 to 1.
    predicted, realised: accepted draft tokens per step with drafting, mean over all such steps.
    recent_predicted, recent_realised: the same with forgetting, over about the last 100 steps.
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
        self._bins = np.zeros((3, BINS))  # observations, sum of predictions, accepted, with forgetting
        self._steps = np.zeros(3)  # steps, predicted, realised accepted tokens
        self._recent = np.zeros(3)

    def add(self, conditional: Floats, accepted: Bools, predicted_tokens: float, accepted_tokens: int) -> None:
        """One step: probabilities and outcomes of nodes whose parent was accepted, and the accepted tokens."""
        bins = np.minimum((conditional * BINS).astype(np.int64), BINS - 1)
        self._observations += len(bins)
        self._bins *= RECENT_NODES
        self._bins[0] += np.bincount(bins, minlength=BINS)
        self._bins[1] += np.bincount(bins, conditional, BINS)
        self._bins[2] += np.bincount(bins, accepted, BINS)
        step = (1.0, predicted_tokens, float(accepted_tokens))
        self._steps += step
        self._recent *= RECENT
        self._recent += step

    def report(self) -> CalibrationReport:
        """Where it stands; zeros before the first step."""
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
