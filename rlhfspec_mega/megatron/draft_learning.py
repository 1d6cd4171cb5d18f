"""How a draft is trained in a run; plain data for the driver too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DraftLearning:
    """How a draft is trained in a run.

    Attributes:
        buffer_tokens: recent tokens with their hidden states that it learns from, at most.
        temperature: the samples'.
        recent_only: learn from the samples of the last pass alone: what a longer memory held would not come back with
            a checkpoint.
    """

    buffer_tokens: int
    learning_rate: float
    temperature: float
    seed: int
    recent_only: bool
