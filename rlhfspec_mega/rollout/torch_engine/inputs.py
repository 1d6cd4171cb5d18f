"""The flat inputs of one forward over KV slots: each row brings its own number of tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Inputs(NamedTuple):
    """N tokens of the first `batch` slots, ordered by row, then column.

    Attributes:
        tokens: int64 [N].
        positions: int64 [N], in the sequence: what rotates.
        rows: int64 [N], the slot.
        columns: int64 [N], number among the inputs of the row, from 0.
        places: int64 [N], where in the slot's cache the key and value are written.
        visible: bool [N, L], which of the first L places an input attends to.
        batch: rows, with or without inputs.
        queries: most inputs of a row.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    places: torch.Tensor
    visible: torch.Tensor
    batch: int
    queries: int


def number_in_row(rows: Ints) -> Ints:
    """How many entries of the same row precede each one; `rows` is sorted."""
    starts = np.searchsorted(rows, rows)
    return np.arange(len(rows)) - starts


def ragged(counts: Ints) -> tuple[Ints, Ints]:
    """(row, column) of every entry when row i has counts[i] of them."""
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, number_in_row(rows)
