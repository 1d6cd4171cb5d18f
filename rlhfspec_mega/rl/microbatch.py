"""Micro-batches: tensors of a few samples, packed or padded, the unit that a pipeline schedule runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F

from rlhfspec_mega.rl.experience import Experience

WEIGHTS = "weights"  # the column of loss weights


@dataclass
class MicroBatch:
    """Tensors [rows, length]; position t of a per-token tensor refers to the token after input t.

    Packed samples lie one after the other in one row; others have a row each. What remains is padding, at the end.

    Attributes:
        inputs: int64 token ids without the last token of each sample.
        targets: int64, the token after each input.
        mask: bool, true where the target is a response token.
        columns: those of the experience, 0 outside the mask.
        lengths: inputs of each sample.
        indices: which samples of the step they are; empty for a padding micro-batch.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor
    columns: dict[str, torch.Tensor]
    lengths: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    packed: bool = False

    @property
    def places(self) -> list[tuple[int, int]]:
        """Row and first position of each sample."""
        if not self.packed:
            return [(row, 0) for row in range(len(self.lengths))]
        return [(0, first) for first in itertools.accumulate(self.lengths[:-1], initial=0)][: len(self.lengths)]

    @property
    def parts(self) -> list[int]:
        """Lengths of what attention keeps apart in the row of packed samples: theirs, and that of the padding."""
        padding = self.inputs.shape[1] - sum(self.lengths)
        return self.lengths + ([padding] if padding else [])

    @property
    def weights(self) -> torch.Tensor:
        """fp32 loss weights, 0 outside the mask."""
        return self.columns[WEIGHTS]

    @property
    def loss_tokens(self) -> int:
        """Number of response tokens with weight, over which the loss is averaged."""
        return int((self.weights > 0).sum())


@dataclass
class Shard:
    """One data-parallel rank's part of a mini-batch.

    Attributes:
        samples: in the order of micro-batches.
        rows: samples of each micro-batch; 0: a padding micro-batch of one row without weight (a pipeline schedule or
            an uneven data-parallel split needs it).
        indices: of the samples within the mini-batch.
        multiple: lengths of rows are multiples of this (the tensor-parallel size under sequence parallelism).
        packed: whether the samples of a micro-batch lie in one row.
    """

    samples: Experience
    rows: list[int]
    indices: list[int]
    multiple: int = 1
    packed: bool = False

    @classmethod
    def cut(
        cls, samples: Experience, plan: Sequence[Sequence[int]], multiple: int = 1, *, packed: bool = False
    ) -> Shard:
        """The samples of a mini-batch that `plan` names, by micro-batch."""
        indices = [index for batch in plan for index in batch]
        return cls(samples.select(indices), [len(batch) for batch in plan], indices, multiple, packed)

    @property
    def inputs(self) -> int:
        """Inputs of all samples, without padding."""
        return int((self.samples.lengths - 1).sum())

    @property
    def positions(self) -> int:
        """Positions that the model computes for them, with padding."""
        return sum(self.micro_batch_positions)

    @property
    def micro_batch_positions(self) -> list[int]:
        """Positions that the model computes for each micro-batch."""
        return [rows * length for rows, length in (self._size(*bounds) for bounds in self._bounds())]

    def batches(self) -> list[MicroBatch]:
        """The micro-batches."""
        return [self._collated(first, last) for first, last in self._bounds()]

    def _bounds(self) -> list[tuple[int, int]]:
        return list(itertools.pairwise(np.cumsum([0, *self.rows]).tolist()))

    def _size(self, first: int, last: int) -> tuple[int, int]:
        """[rows, length] of these samples."""
        inputs = self.samples.lengths[first:last] - 1
        needed = int(inputs.sum() if self.packed else inputs.max(initial=0))
        length = -(-max(needed, 1) // self.multiple) * self.multiple
        return (1 if self.packed else max(1, last - first)), length

    def _collated(self, first: int, last: int) -> MicroBatch:
        samples, responses = self.samples, self.samples.response_offsets
        shape = self._size(first, last)
        inputs, targets = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        mask = np.zeros(shape, np.bool_)
        columns = {name: np.zeros(shape, column.dtype) for name, column in samples.columns.items()}
        found = MicroBatch(
            torch.from_numpy(inputs),
            torch.from_numpy(targets),
            torch.from_numpy(mask),
            columns={name: torch.from_numpy(column) for name, column in columns.items()},
            lengths=(samples.lengths[first:last] - 1).tolist(),
            indices=self.indices[first:last],
            packed=self.packed,
        )
        for sample, (row, place) in zip(range(first, last), found.places, strict=True):
            tokens = samples.tokens[samples.offsets[sample] : samples.offsets[sample + 1]]
            end = place + len(tokens) - 1
            inputs[row, place:end], targets[row, place:end] = tokens[:-1], tokens[1:]
            # Input prompt_length - 1 predicts the first response token.
            response = slice(place + samples.prompt_lengths[sample] - 1, end)
            mask[row, response] = True
            for name, column in samples.columns.items():
                columns[name][row, response] = column[responses[sample] : responses[sample + 1]]
        if WEIGHTS not in samples.columns:  # without weights every response token counts the same
            found.columns[WEIGHTS] = found.mask.float()
        return found


def same_shape(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Pad every micro-batch at the end with empty rows and columns to the largest [rows, length] of them all."""
    rows = max(batch.inputs.shape[0] for batch in batches)
    length = max(batch.inputs.shape[1] for batch in batches)

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        return F.pad(tensor, (0, length - tensor.shape[1], 0, rows - tensor.shape[0]))

    return [
        replace(
            batch,
            inputs=padded(batch.inputs),
            targets=padded(batch.targets),
            mask=padded(batch.mask),
            columns={name: padded(column) for name, column in batch.columns.items()},
        )
        for batch in batches
    ]


# (log-probs, entropy, micro-batch), or (values, micro-batch) of a model with a value head
#   -> (loss per token, metrics per token); all [rows, length] tensors
TokenLoss = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]


@dataclass(frozen=True)
class Objective:
    """What a model learns from a mini-batch.

    Attributes:
        metrics: names of what the loss reports.
        keep_columns: whether the log-probs or values from before the update are wanted, too.
    """

    loss: TokenLoss
    metrics: Sequence[str]
    keep_columns: bool = False
