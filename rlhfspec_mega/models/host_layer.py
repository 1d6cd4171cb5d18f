"""A decoder's layer for few rows, on one thread of a CPU: a compiled function for the part before attention and after.

A product of few rows has half of the pace of one with 64 in BLAS, which arranges its operands anew for each; these read
weights as they are. What is between products (norms, activations, residuals) takes torch, call by call, as long as the
products of a single row in a model of a million weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rlhfspec_mega.compiled import inlined, vectorized
from rlhfspec_mega.exponential import exponential
from rlhfspec_mega.models.host_floats import Floats, Single, host_array, load, store
from rlhfspec_mega.models.host_kernels import normalize

Singles = NDArray[np.float32]
Weights = Floats | NDArray[np.int8]

_ROWS, _OUTPUTS = 4, 3  # of a tile, whose twelve sums stay in registers together with what is multiplied
_PAIR = 2  # rows of a smaller one
_AT_ONCE = 4  # outputs of a single row
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)
# Rows up to which these functions are quicker than torch's with BLAS products, where weights stay in a core's caches.
# Measured on an EPYC with AVX2, 0.8 million weights: 0.53 of the time at 1 row, 0.65 at 8, 0.78 at 16, 0.95 at 32.
_MOST_ROWS = 32
_FEW_WEIGHTS = 2**22


@dataclass(frozen=True)
class HostMatrix:
    """A matrix [out, in] as compiled functions read it: numbers, and the scale [out] of each of its rows."""

    weights: Weights
    scales: Singles

    @classmethod
    def of(cls, matrix: torch.Tensor) -> HostMatrix:
        """In the memory of a tensor, unscaled."""
        return cls(host_array(matrix), np.ones(len(matrix), np.float32))


@dataclass(frozen=True)
class HostLayer:
    """A layer's weights in the memory of `transformer.LayerWeights`; `qkv_bias` is empty if it has none."""

    input_norm: Floats
    qkv: HostMatrix
    qkv_bias: Floats
    out: HostMatrix
    post_norm: Floats
    gate_up: HostMatrix
    down: HostMatrix
    epsilon: np.float32

    def before_attention(self, x: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values [N, rows of the QKV matrix] of x [N, hidden]."""
        found = x.new_empty(len(x), len(self.qkv.weights))
        matrix = self.qkv.weights, self.qkv.scales
        _before_attention(host_array(x), self.input_norm, self.epsilon, *matrix, self.qkv_bias, host_array(found))
        return found

    def after_attention(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """The layer's output [N, hidden] of x [N, hidden], whose attention gave `mixed` [N, heads x head_dim]."""
        return after_attention(x, mixed, self.out, self.post_norm, self.epsilon, self.gate_up, self.down)


def few_rows(weights: int, dtype: torch.dtype) -> int:
    """Rows up to which a target of so many weights is computed by these functions; oneDNN has products of bfloat16."""
    return _MOST_ROWS if weights <= _FEW_WEIGHTS and dtype == torch.float32 else 0


def product(x: torch.Tensor, matrix: HostMatrix) -> torch.Tensor:
    """x W^T for x [N, in], in the dtype of x."""
    found = x.new_empty(len(x), len(matrix.weights))
    _product(host_array(x), matrix.weights, matrix.scales, host_array(found))
    return found


def normed_product(x: torch.Tensor, norm: Floats, epsilon: np.float32, matrix: HostMatrix) -> torch.Tensor:
    """float32 product of the RMSNorm of x [N, in]."""
    found = torch.empty(len(x), len(matrix.weights))
    _normed_product(host_array(x), norm, epsilon, matrix.weights, matrix.scales, found.numpy())
    return found


def after_attention(
    x: torch.Tensor,
    mixed: torch.Tensor,
    out: HostMatrix,
    norm: Floats,
    epsilon: np.float32,
    gate_up: HostMatrix,
    down: HostMatrix,
) -> torch.Tensor:
    """See HostLayer.after_attention."""
    found = torch.empty_like(x)
    first, second, third = ((one.weights, one.scales) for one in (out, gate_up, down))
    given = host_array(x), host_array(mixed), norm, epsilon
    _after_attention(*given, *first, *second, *third, host_array(found))
    return found


@vectorized
def _product(x: Floats, weights: Weights, scales: Singles, found: Floats) -> None:
    values, sums = np.empty(x.shape, np.float32), np.empty(found.shape, np.float32)
    for row in range(len(x)):
        for place in range(x.shape[1]):
            values[row, place] = load(x[row], place)
    multiply(values, weights, scales, sums)
    for row in range(len(x)):
        store(found[row], sums[row])


@vectorized
def _normed_product(x: Floats, norm: Floats, eps: Single, weights: Weights, scales: Singles, found: Singles) -> None:
    values = np.empty(x.shape, np.float32)
    for row in range(len(x)):
        normalize(x[row], norm, eps, values[row])
    multiply(values, weights, scales, found)


@vectorized
def _before_attention(
    x: Floats, norm: Floats, eps: Single, weights: Weights, scales: Singles, bias: Floats, found: Floats
) -> None:
    values, sums = np.empty(x.shape, np.float32), np.empty(found.shape, np.float32)
    for row in range(len(x)):
        normalize(x[row], norm, eps, values[row])
    multiply(values, weights, scales, sums)
    for row in range(len(x)):
        sums_of = sums[row]
        for place in range(len(bias)):
            sums_of[place] += load(bias, place)
        store(found[row], sums_of)


@vectorized
def _after_attention(
    states: Floats,
    mixed: Floats,
    norm: Floats,
    eps: Single,
    out: Weights,
    out_scales: Singles,
    gate_up: Weights,
    gate_up_scales: Singles,
    down: Weights,
    down_scales: Singles,
    found: Floats,
) -> None:
    count, hidden = states.shape
    inner = gate_up.shape[0] // 2
    attended, x = np.empty(mixed.shape, np.float32), np.empty((count, hidden), np.float32)
    normed, gates = np.empty((count, hidden), np.float32), np.empty((count, 2 * inner), np.float32)
    added, products = np.empty((count, hidden), np.float32), np.empty((count, inner), np.float32)
    for row in range(count):
        for place in range(mixed.shape[1]):
            attended[row, place] = load(mixed[row], place)
    multiply(attended, out, out_scales, x)
    for row in range(count):
        for place in range(hidden):
            x[row, place] += load(states[row], place)
        normalize(x[row], norm, eps, normed[row])
    multiply(normed, gate_up, gate_up_scales, gates)
    for row in range(count):
        gate, up, product_of = gates[row, :inner], gates[row, inner:], products[row]
        for place in range(inner):
            small = exponential(-np.abs(gate[place]))  # silu(g) = g s(g), with s(g) = 1 / (1 + exp(-g))
            sigmoid = (_ONE if gate[place] >= _ZERO else small) / (_ONE + small)
            product_of[place] = gate[place] * sigmoid * up[place]
    multiply(products, down, down_scales, added)
    for row in range(count):
        for place in range(hidden):
            x[row, place] += added[row, place]
        store(found[row], x[row])


@inlined
def multiply(x: Singles, weights: Weights, scales: Singles, found: Singles) -> None:
    """x W^T: four rows, or the last two, and three outputs at once, or four outputs of a single row."""
    count, outputs = len(x), len(weights)
    if count == 1:
        _multiply_one(x[0], weights, scales, found[0])
        return
    left = count % _ROWS
    fours = count if left > _PAIR else count - left
    # The last row, or output, stands in for those that a tile lacks.
    for first in range(0, outputs, _OUTPUTS):
        at = first, min(first + 1, outputs - 1), min(first + 2, outputs - 1)
        for row in range(0, fours, _ROWS):
            rows = row, min(row + 1, count - 1), min(row + 2, count - 1), min(row + 3, count - 1)
            _multiply_four(x, weights, scales, found, rows, at)
        if fours < count:
            _multiply_two(x, weights, scales, found, (fours, count - 1), at)


@inlined
def _multiply_four(
    x: Singles,
    weights: Weights,
    scales: Singles,
    found: Singles,
    rows: tuple[int, int, int, int],
    outputs: tuple[int, int, int],
) -> None:
    row0, row1, row2, row3 = rows
    first, second, third = outputs
    x0, x1, x2, x3 = x[row0], x[row1], x[row2], x[row3]
    weights0, weights1, weights2 = weights[first], weights[second], weights[third]
    sum00 = sum01 = sum02 = sum10 = sum11 = sum12 = np.float32(0.0)
    sum20 = sum21 = sum22 = sum30 = sum31 = sum32 = np.float32(0.0)
    for place in range(x.shape[1]):
        weight0, weight1, weight2 = load(weights0, place), load(weights1, place), load(weights2, place)
        sum00 += x0[place] * weight0
        sum01 += x0[place] * weight1
        sum02 += x0[place] * weight2
        sum10 += x1[place] * weight0
        sum11 += x1[place] * weight1
        sum12 += x1[place] * weight2
        sum20 += x2[place] * weight0
        sum21 += x2[place] * weight1
        sum22 += x2[place] * weight2
        sum30 += x3[place] * weight0
        sum31 += x3[place] * weight1
        sum32 += x3[place] * weight2
    scale0, scale1, scale2 = scales[first], scales[second], scales[third]
    found[row0, first], found[row0, second], found[row0, third] = sum00 * scale0, sum01 * scale1, sum02 * scale2
    found[row1, first], found[row1, second], found[row1, third] = sum10 * scale0, sum11 * scale1, sum12 * scale2
    found[row2, first], found[row2, second], found[row2, third] = sum20 * scale0, sum21 * scale1, sum22 * scale2
    found[row3, first], found[row3, second], found[row3, third] = sum30 * scale0, sum31 * scale1, sum32 * scale2


@inlined
def _multiply_two(
    x: Singles,
    weights: Weights,
    scales: Singles,
    found: Singles,
    rows: tuple[int, int],
    outputs: tuple[int, int, int],
) -> None:
    row0, row1 = rows
    first, second, third = outputs
    x0, x1 = x[row0], x[row1]
    weights0, weights1, weights2 = weights[first], weights[second], weights[third]
    sum00 = sum01 = sum02 = sum10 = sum11 = sum12 = np.float32(0.0)
    for place in range(x.shape[1]):
        weight0, weight1, weight2 = load(weights0, place), load(weights1, place), load(weights2, place)
        sum00 += x0[place] * weight0
        sum01 += x0[place] * weight1
        sum02 += x0[place] * weight2
        sum10 += x1[place] * weight0
        sum11 += x1[place] * weight1
        sum12 += x1[place] * weight2
    scale0, scale1, scale2 = scales[first], scales[second], scales[third]
    found[row0, first], found[row0, second], found[row0, third] = sum00 * scale0, sum01 * scale1, sum02 * scale2
    found[row1, first], found[row1, second], found[row1, third] = sum10 * scale0, sum11 * scale1, sum12 * scale2


@inlined
def _multiply_one(values: Singles, weights: Weights, scales: Singles, found: Singles) -> None:
    outputs, inputs = weights.shape
    whole = outputs - outputs % _AT_ONCE
    for output in range(0, whole, _AT_ONCE):
        row0, row1 = weights[output], weights[output + 1]
        row2, row3 = weights[output + 2], weights[output + 3]
        sum0 = sum1 = sum2 = sum3 = np.float32(0.0)
        for place in range(inputs):
            value = values[place]
            sum0 += value * load(row0, place)
            sum1 += value * load(row1, place)
            sum2 += value * load(row2, place)
            sum3 += value * load(row3, place)
        found[output], found[output + 1] = sum0 * scales[output], sum1 * scales[output + 1]
        found[output + 2], found[output + 3] = sum2 * scales[output + 2], sum3 * scales[output + 3]
    for output in range(whole, outputs):
        row, total = weights[output], np.float32(0.0)
        for place in range(inputs):
            total += values[place] * load(row, place)
        found[output] = total * scales[output]
