"""Attention over a row that holds several sequences one after the other: none sees another.

Transformer Engine does this with kernels of its own; what runs here are batches of sequences of similar lengths on
torch's scaled_dot_product_attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

_FULL_ENOUGH = 0.8  # least share of a run's cells that hold tokens; attention alone computes the others


@dataclass(frozen=True)
class Run:
    """Neighbouring sequences whose attention is computed as one batch of [rows, columns] cells.

    Attributes:
        tokens: how many.
        cells: int64 [rows * columns], which of the tokens is in each cell; None: all cells are full.
        full: int64 [tokens], the cell of each token; None likewise.
    """

    tokens: int
    columns: int
    cells: torch.Tensor | None
    full: torch.Tensor | None


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's bounds of the sequences in a row, with the runs that the attention without fused kernels computes."""

    runs: Sequence[Run] = ()


def packed_sequences(lengths: Sequence[int], device: torch.device) -> PackedSequences:
    """Bounds of sequences of these lengths, in tokens, which fill a row."""
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    longest = max(lengths)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        runs=_runs(lengths, device),
    )


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, runs: Sequence[Run]) -> torch.Tensor:
    """Causal attention within each sequence; [tokens, heads, d] and [tokens, kv_heads, d] -> [tokens, heads * d]."""
    counts = [run.tokens for run in runs]  # one split: the gradient of a slice of its own would be as long as the row
    parts = zip(*(tensor.split(counts) for tensor in (query, key, value)), runs, strict=True)
    return torch.cat([_attend_run(*part) for part in parts])


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Of queries [rows, length, heads, d], and keys and values of kv_heads; returns the shape of the queries."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if k.shape[1] != q.shape[1]:
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _attend_run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, run: Run) -> torch.Tensor:
    q, k, v = (
        (part if run.cells is None else part.index_select(0, run.cells)).unflatten(0, (-1, run.columns))
        for part in (query, key, value)
    )
    out = causal_attention(q, k, v).flatten(2).flatten(0, 1)
    return out if run.full is None else out.index_select(0, run.full)


def _runs(lengths: Sequence[int], device: torch.device) -> list[Run]:
    runs: list[Run] = []
    begin = 0
    while begin < len(lengths):
        end = begin + 1
        while end < len(lengths) and _full_enough(lengths[begin : end + 1]):
            end += 1
        runs.append(_run(lengths[begin:end], device))
        begin = end
    return runs


def _full_enough(lengths: Sequence[int]) -> bool:
    return sum(lengths) >= _FULL_ENOUGH * len(lengths) * max(lengths)


def _run(lengths: Sequence[int], device: torch.device) -> Run:
    columns, tokens = max(lengths), sum(lengths)
    if columns == min(lengths):
        return Run(tokens, columns, None, None)
    full = np.flatnonzero(np.arange(columns) < np.asarray(lengths)[:, None])
    cells = np.zeros(len(lengths) * columns, np.int64)  # an empty cell repeats the first token, and nobody reads it
    cells[full] = np.arange(tokens)
    return Run(tokens, columns, torch.from_numpy(cells).to(device), torch.from_numpy(full).to(device))
