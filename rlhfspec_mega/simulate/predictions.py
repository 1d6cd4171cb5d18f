"""What policies are told of the tokens still to come: predicted as in a real run, or the truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from rlhfspec_mega.planning.lengths import LengthPredictor
from rlhfspec_mega.planning.rollout_state import Floats, Ints
from rlhfspec_mega.simulate.workload import Workload


class Predictions(Protocol):
    """Predicts from the samples that have ended."""

    def finished(self, sample: int, tokens: int) -> None:
        """A sample has ended with so many response tokens."""

    def remaining(self, samples: Ints, generated: Ints) -> Floats:
        """Response tokens that unfinished samples, which have `generated` by now, still have to come; at least 1."""


class Oracle:
    """The truth: what a policy could do at best."""

    def __init__(self, workload: Workload) -> None:
        self._lengths = workload.lengths

    def finished(self, sample: int, tokens: int) -> None:
        """Nothing to learn."""

    def remaining(self, samples: Ints, generated: Ints) -> Floats:
        return np.maximum(self._lengths[samples] - generated, 1).astype(np.float64)


class Learned:
    """What a real run predicts.

    Args:
        earlier: rollouts that it has seen before this one, of other prompts.
    """

    def __init__(self, workload: Workload, earlier: Sequence[Workload] = ()) -> None:
        self._groups = workload.groups
        self._predictor = LengthPredictor(workload.limit)
        for number, past in enumerate(earlier):
            self._predictor.begin(_keys(past, f"earlier {number}"))
            for group, length in zip(past.groups.tolist(), past.lengths.tolist(), strict=True):
                self._predictor.finished(group, length)
            self._predictor.end()
        self._predictor.begin(_keys(workload, "now"))

    def finished(self, sample: int, tokens: int) -> None:
        self._predictor.finished(int(self._groups[sample]), tokens)

    def remaining(self, samples: Ints, generated: Ints) -> Floats:
        return self._predictor.predict(self._groups[samples], generated)


def _keys(workload: Workload, rollout: str) -> list[str]:
    return [f"{rollout}, prompt {group}" for group in range(int(workload.groups.max()) + 1)]
