"""The samples of a step as flat arrays, from finished samples to updates."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


@dataclass
class Experience:
    """Ragged arrays: sample i has the tokens from `offsets[i]` to `offsets[i + 1]`.

    Attributes:
        tokens: int32 [all tokens], of prompt and response.
        offsets: [samples + 1].
        prompt_lengths: [samples].
        per_sample: name -> one value per sample, [samples], such as rewards.
        columns: name -> one value per response token, [all response tokens], float32: log-probs, advantages, loss
            weights, and whatever a user's loss reads.
    """

    tokens: NDArray[np.int32]
    offsets: Integers
    prompt_lengths: Integers
    per_sample: dict[str, NDArray] = field(default_factory=dict)
    columns: dict[str, NDArray] = field(default_factory=dict)

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Experience:
        """From the prompt tokens and response tokens of each sample."""
        parts = [np.asarray(part, np.int32) for pair in zip(prompts, responses, strict=True) for part in pair]
        sizes = np.array([len(part) for part in parts], np.int64).reshape(-1, 2)
        tokens = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        return cls(tokens, starts(sizes.sum(1)), sizes[:, 0])

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> Integers:
        """Tokens of each sample, [samples]."""
        return np.diff(self.offsets)

    @property
    def response_lengths(self) -> Integers:
        """Response tokens of each sample, [samples]."""
        return self.lengths - self.prompt_lengths

    @property
    def response_offsets(self) -> Integers:
        """Offset of each sample's values in a column, [samples + 1]."""
        return starts(self.response_lengths)

    def joined(self, values: Sequence[ArrayLike]) -> Floats:
        """A column from each sample's values. Raises ValueError unless there is one value for every response token."""
        if [np.size(part) for part in values] != self.response_lengths.tolist():
            raise ValueError("a column needs one value for every response token")
        return np.concatenate([np.asarray(part, np.float32) for part in values] or [np.zeros(0, np.float32)])

    def spread(self, values: ArrayLike) -> Floats:
        """A column in which all tokens of a sample have the sample's value; `values` [samples]."""
        return np.repeat(np.asarray(values, np.float32), self.response_lengths)

    def by_sample(self, column: NDArray) -> Iterator[NDArray]:
        """The parts of a column, one per sample."""
        bounds = self.response_offsets
        for first, last in itertools.pairwise(bounds):
            yield column[first:last]

    def place(self, column: NDArray, samples: Sequence[int], values: NDArray) -> None:
        """Write the values of these samples, given one after the other, into their places in a column."""
        bounds, first = self.response_offsets, 0
        for sample in samples:
            size = bounds[sample + 1] - bounds[sample]
            column[bounds[sample] : bounds[sample + 1]] = values[first : first + size]
            first += size

    def summed(self, column: NDArray) -> NDArray[np.float64]:
        """Sum over each sample's tokens, [samples]."""
        return np.array([part.sum(dtype=np.float64) for part in self.by_sample(column)])

    def select(self, samples: ArrayLike) -> Experience:
        """A copy of these samples, in this order."""
        chosen = np.asarray(samples, np.int64)
        return Experience(
            _parts(self.tokens, self.offsets, chosen),
            starts(self.lengths[chosen]),
            self.prompt_lengths[chosen],
            {name: values[chosen] for name, values in self.per_sample.items()},
            {name: _parts(column, self.response_offsets, chosen) for name, column in self.columns.items()},
        )


def ending_values(sequences: Sequence[Sequence[int]]) -> Experience:
    """Experience in which a model with a value head gives each sequence one number: the value after its last token.

    Values are computed before each response token, so a response of one token, which is never read, is appended.
    """
    return Experience.of(sequences, [[0]] * len(sequences))


def starts(lengths: NDArray) -> Integers:
    """Offsets [n + 1] of consecutive parts with these lengths [n]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _parts(values: NDArray, offsets: Integers, chosen: Integers) -> NDArray:
    """Copy the variable-length parts listed in `chosen` into one new array.

    Part i is values[offsets[i]:offsets[i + 1]].
    """
    bounds = zip(offsets[chosen].tolist(), offsets[chosen + 1].tolist(), strict=True)
    return np.concatenate([values[first:last] for first, last in bounds] or [values[:0]])
