"""Operations that torch makes of many small ones, in one pass each: for float32 on one thread of a CPU.

Where a model is small, a decode step consists of calls, not of arithmetic: RMSNorm takes torch 7 to 15 microseconds
for a single token, and the rotary embedding ten, in every layer. Matrix products stay BLAS's.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rlhfspec_mega.compiled import COMPILES, vectorized

Singles = NDArray[np.float32]
Single = float | np.float32
Ints = NDArray[np.int64]


def suits_host_kernels(weights: torch.Tensor) -> bool:
    """Whether a model with weights like these is computed with compiled functions."""
    one_thread = torch.get_num_threads() == 1
    return COMPILES and one_thread and weights.device.type == "cpu" and weights.dtype == torch.float32


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of float32 x [N, hidden], as torch.nn.functional.rms_norm."""
    normed = torch.empty_like(x)
    _rms_norm(x.numpy(), weight.numpy(), np.float32(eps), normed.numpy())
    return normed


def rotate_heads_(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, heads: int) -> None:
    """Rotate the first `heads` heads of float32 qkv [N, heads and more, head_dim] in place, as `rope.Rotary` does.

    Args:
        cos, sin: float32 [positions, head_dim], from `rope.rope_table`.
        positions: int64 [N].
    """
    _rotate_heads(qkv.numpy(), cos.numpy(), sin.numpy(), positions.numpy(), heads)


@vectorized
def _rms_norm(x: Singles, weight: Singles, eps: Single, normed: Singles) -> None:
    rows, width = x.shape
    for row in range(rows):
        squares = np.float32(0.0)
        for place in range(width):
            squares += x[row, place] * x[row, place]
        scale = np.float32(1.0) / np.sqrt(squares / np.float32(width) + eps)
        for place in range(width):
            normed[row, place] = x[row, place] * scale * weight[place]


@vectorized
def _rotate_heads(qkv: Singles, cos: Singles, sin: Singles, positions: Ints, heads: int) -> None:
    half = qkv.shape[2] // 2
    for row in range(len(qkv)):
        cosines, sines = cos[positions[row]], sin[positions[row]]
        for head in range(heads):
            values = qkv[row, head]
            for place in range(half):
                first, second = values[place], values[place + half]
                values[place] = first * cosines[place] + second * sines[place]
                values[place + half] = second * cosines[place + half] + first * sines[place + half]
