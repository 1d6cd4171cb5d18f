"""Operations that torch makes of many small ones, in one pass each: for one thread of a CPU.

Where a model is small, a decode step consists of calls, not of arithmetic: RMSNorm takes torch 7 to 15 microseconds
for a single token in float32 and 60 in bfloat16, and the rotary embedding ten, in every layer. Matrix products stay
BLAS's.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rlhfspec_mega.compiled import COMPILES, inlined, vectorized
from rlhfspec_mega.models.host_floats import HOST_DTYPES, Floats, Single, host_array, load, store

Ints = NDArray[np.int64]


def suits_host_kernels(weights: torch.Tensor) -> bool:
    """Whether a model with weights like these is computed with compiled functions."""
    one_thread = torch.get_num_threads() == 1
    return COMPILES and one_thread and weights.device.type == "cpu" and weights.dtype in HOST_DTYPES


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of x [N, hidden], as torch.nn.functional.rms_norm."""
    normed = torch.empty_like(x)
    _rms_norm(host_array(x), host_array(weight), np.float32(eps), host_array(normed))
    return normed


def rotate_heads_(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, heads: int) -> None:
    """Rotate the first `heads` heads of qkv [N, heads and more, head_dim] in place, as `rope.Rotary` does.

    Args:
        cos, sin: [positions, head_dim], from `rope.rope_table`.
        positions: int64 [N].
    """
    _rotate_heads(host_array(qkv), host_array(cos), host_array(sin), positions.numpy(), heads)


@inlined
def normalize(values: Floats, weight: Floats, eps: Single, normed: NDArray[np.float32]) -> None:
    """RMSNorm of a vector."""
    width, squares = len(values), np.float32(0.0)
    for place in range(width):
        squares += load(values, place) * load(values, place)
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(width) + eps)
    for place in range(width):
        normed[place] = load(values, place) * scale * load(weight, place)


@vectorized
def _rms_norm(x: Floats, weight: Floats, eps: Single, normed: Floats) -> None:
    results = np.empty(x.shape[1], np.float32)
    for row in range(len(x)):
        normalize(x[row], weight, eps, results)
        store(normed[row], results)


@vectorized
def _rotate_heads(qkv: Floats, cos: Floats, sin: Floats, positions: Ints, heads: int) -> None:
    width = qkv.shape[2]
    half, results = width // 2, np.empty(width, np.float32)
    firsts, seconds = results[:half], results[half:]
    for row in range(len(qkv)):
        cosines, sines = cos[positions[row]], sin[positions[row]]
        cos1, sin1, cos2, sin2 = cosines[:half], sines[:half], cosines[half:], sines[half:]
        for head in range(heads):
            values = qkv[row, head]
            first, second = values[:half], values[half:]
            for place in range(half):
                firsts[place] = load(first, place) * load(cos1, place) + load(second, place) * load(sin1, place)
            for place in range(half):
                seconds[place] = load(second, place) * load(cos2, place) + load(first, place) * load(sin2, place)
            store(values, results)
