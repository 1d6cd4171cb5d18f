"""What a draft learns from: sequences of the target's own sampling with its hidden states; unpadded batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LOOKAHEAD = 2  # the draft's entry t predicts token t + 2: the first two tokens of a sequence are never predicted


@dataclass
class DraftExample:
    """One sequence of the target's own sampling.

    Attributes:
        tokens: int64 [T], prompt and response.
        prompt_length: tokens of the prompt.
        features: [T, 3 * hidden], outputs of the tapped target layers (DraftShape.taps), low to high.
        states: [T, hidden], the target's final normed states, which its head turns into logits.
    """

    tokens: Tensor
    prompt_length: int
    features: Tensor
    states: Tensor

    @property
    def predicted(self) -> int:
        """Response tokens that a draft can predict."""
        return max(0, len(self.tokens) - max(self.prompt_length, LOOKAHEAD))


@dataclass(frozen=True)
class DraftBatch:
    """The entries of some sequences one after another, and its cells: the response tokens to predict.

    A sequence of T tokens has T - 2 entries; entry t reads features t, embeds token t + 1 and predicts token t + 2.
    A sequence's cells are its last entries, those that predict response tokens, in order.

    Attributes:
        inputs: int64 [E], token t + 1 of each entry.
        features: float32 [E, 3 * hidden].
        states: float32 [C, hidden], of each cell the target's state t + 1, from which it samples token t + 2.
        entries, cells: how many of each, per sequence.
    """

    inputs: Tensor
    features: Tensor
    states: Tensor
    entries: tuple[int, ...]
    cells: tuple[int, ...]


def make_batch(examples: Sequence[DraftExample], device: torch.device | str = "cpu") -> DraftBatch:
    """A batch on `device` of examples with at least one token to predict each."""

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors)).to(device)

    return DraftBatch(
        inputs=joined([example.tokens[1:-1] for example in examples]),
        features=joined([example.features[:-LOOKAHEAD] for example in examples]).float(),
        states=joined([example.states[-1 - example.predicted : -1] for example in examples]).float(),
        entries=tuple(len(example.tokens) - LOOKAHEAD for example in examples),
        cells=tuple(example.predicted for example in examples),
    )
