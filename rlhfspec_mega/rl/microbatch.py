"""Micro-batches: right-padded tensors of a few samples, the unit that a pipeline schedule runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from rlhfspec_mega.rl.experience import Experience

WEIGHTS = "weights"  # the column of loss weights


@dataclass
class MicroBatch:
    """Tensors [rows, length]; position t of a per-token tensor refers to the token after input t.

    Attributes:
        inputs: int64 token ids without the last token of each sample.
        targets: int64, the token after each input.
        mask: bool, true where the target is a response token.
        columns: those of the experience, 0 outside the mask.
        indices: which samples of the step the rows are; empty for a padding micro-batch.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor
    columns: dict[str, torch.Tensor]
    indices: list[int] = field(default_factory=list)

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
        multiple: padded lengths are multiples of this (the tensor-parallel size under sequence parallelism).
    """

    samples: Experience
    rows: list[int]
    indices: list[int]
    multiple: int = 1

    @classmethod
    def cut(cls, samples: Experience, plan: Sequence[Sequence[int]], multiple: int = 1) -> Shard:
        """The samples of a mini-batch that `plan` names, by micro-batch."""
        indices = [index for batch in plan for index in batch]
        return cls(samples.select(indices), [len(batch) for batch in plan], indices, multiple)

    def batches(self) -> list[MicroBatch]:
        """The padded micro-batches."""
        bounds = np.cumsum([0, *self.rows]).tolist()
        return [self._collated(first, last) for first, last in itertools.pairwise(bounds)]

    def _collated(self, first: int, last: int) -> MicroBatch:
        """These samples, padded to one length."""
        samples, responses = self.samples, self.samples.response_offsets
        rows = max(1, last - first)
        longest = int(samples.lengths[first:last].max(initial=2)) - 1
        length = (max(longest, 1) + self.multiple - 1) // self.multiple * self.multiple
        tokens = np.zeros((rows, length + 1), np.int64)
        mask = np.zeros((rows, length), np.bool_)
        columns = {name: np.zeros((rows, length), column.dtype) for name, column in samples.columns.items()}
        for row, sample in enumerate(range(first, last)):
            begin, end = samples.offsets[sample], samples.offsets[sample + 1]
            tokens[row, : end - begin] = samples.tokens[begin:end]
            # Input prompt_length - 1 predicts the first response token.
            span = slice(samples.prompt_lengths[sample] - 1, end - begin - 1)
            mask[row, span] = True
            for name, column in samples.columns.items():
                columns[name][row, span] = column[responses[sample] : responses[sample + 1]]
        if WEIGHTS not in samples.columns:  # without weights every response token counts the same
            columns[WEIGHTS] = mask.astype(np.float32)
        return MicroBatch(
            inputs=torch.from_numpy(tokens[:, :-1].copy()),
            targets=torch.from_numpy(tokens[:, 1:].copy()),
            mask=torch.from_numpy(mask),
            columns={name: torch.from_numpy(column) for name, column in columns.items()},
            indices=self.indices[first:last],
        )


def same_shape(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Pad every micro-batch with empty rows and columns to the largest [rows, length] of them all."""
    rows = max(batch.inputs.shape[0] for batch in batches)
    length = max(batch.inputs.shape[1] for batch in batches)

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        return F.pad(tensor, (0, length - tensor.shape[1], 0, rows - tensor.shape[0]))

    return [
        MicroBatch(
            padded(batch.inputs),
            padded(batch.targets),
            padded(batch.mask),
            {name: padded(column) for name, column in batch.columns.items()},
            batch.indices,
        )
        for batch in batches
    ]


# (log-probs, entropy, micro-batch), or (values, micro-batch) of a model with a value head
#   -> (loss per token, metrics per token); all [rows, length] tensors
TokenLoss = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]
