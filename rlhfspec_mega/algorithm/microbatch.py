"""Micro-batches: right-padded tensors of a few sequences, the unit that a training schedule orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import torch
import torch.nn.functional as F


@dataclass
class TrainSequence:
    """One sequence with what a loss needs; per-token lists belong to the tokens after `prompt_length`.

    Attributes:
        tokens: prompt and response.
        weight: per-token loss weight; see token_weights.
        advantage: one number for the whole response.
    """

    tokens: Sequence[int]
    prompt_length: int
    weight: float = 1.0
    advantage: float = 0.0
    old_logprobs: Sequence[float] = ()
    engine_logprobs: Sequence[float] = ()
    reference_logprobs: Sequence[float] = ()

    @property
    def response_length(self) -> int:
        return len(self.tokens) - self.prompt_length


@dataclass
class MicroBatch:
    """Tensors [rows, length]; position t of every per-token tensor speaks of the token that follows input t.

    Attributes:
        inputs: int64 token ids, the last token of each sequence left out.
        targets: int64 the token after each input.
        mask: bool, true where the target is a response token.
        weight: fp32 loss weight, 0 outside the mask.
        indices: which sequences of the caller's list the rows are; empty for a padding micro-batch.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor
    weight: torch.Tensor
    advantage: torch.Tensor
    old_logprobs: torch.Tensor
    engine_logprobs: torch.Tensor
    reference_logprobs: torch.Tensor
    indices: list[int] = field(default_factory=list)

    @property
    def loss_tokens(self) -> int:
        """Response tokens with weight: what the loss is averaged over."""
        return int((self.weight > 0).sum())


def collate(sequences: Sequence[TrainSequence], indices: Sequence[int], multiple: int = 1) -> MicroBatch:
    """Pad the chosen sequences to one length.

    Args:
        indices: rows, in order; none gives a padding micro-batch of one row without weight (a pipeline schedule or an
            uneven data-parallel split needs it).
        multiple: the padded length is a multiple of this (tensor-parallel size under sequence parallelism).
    """
    rows = max(1, len(indices))
    longest = max([len(sequences[i].tokens) - 1 for i in indices], default=1)
    length = (max(longest, 1) + multiple - 1) // multiple * multiple
    tokens = torch.zeros(rows, length + 1, dtype=torch.int64)
    mask = torch.zeros(rows, length, dtype=torch.bool)
    values = {
        name: torch.zeros(rows, length)
        for name in ("weight", "advantage", "old_logprobs", "engine_logprobs", "reference_logprobs")
    }
    for row, index in enumerate(indices):
        sequence = sequences[index]
        tokens[row, : len(sequence.tokens)] = torch.tensor(list(sequence.tokens))
        # Input prompt_length - 1 predicts the first response token.
        span = slice(sequence.prompt_length - 1, len(sequence.tokens) - 1)
        mask[row, span] = True
        values["weight"][row, span] = sequence.weight
        values["advantage"][row, span] = sequence.advantage
        for name in ("old_logprobs", "engine_logprobs", "reference_logprobs"):
            given = getattr(sequence, name)
            if len(given):
                values[name][row, span] = torch.tensor(list(given), dtype=torch.float32)
    return MicroBatch(
        inputs=tokens[:, :-1].contiguous(),
        targets=tokens[:, 1:].contiguous(),
        mask=mask,
        indices=list(indices),
        **values,
    )


def same_shape(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Pad every micro-batch with empty rows and columns to the largest [rows, length] of them all."""
    rows = max(batch.inputs.shape[0] for batch in batches)
    length = max(batch.inputs.shape[1] for batch in batches)
    padded = []
    for batch in batches:
        margin = (0, length - batch.inputs.shape[1], 0, rows - batch.inputs.shape[0])
        values = {entry.name: getattr(batch, entry.name) for entry in fields(batch)}
        tensors = {name: F.pad(value, margin) for name, value in values.items() if isinstance(value, torch.Tensor)}
        padded.append(MicroBatch(**(values | tensors)))
    return padded


# (log-probs, entropy, micro-batch) -> (loss per token, metrics per token); all [rows, length] tensors
TokenLoss = Callable[[torch.Tensor, torch.Tensor, MicroBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]
