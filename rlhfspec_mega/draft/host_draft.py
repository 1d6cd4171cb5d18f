"""The draft's layer for few entries, on one thread of a CPU: weights of 8 bits, in a compiled function for each part.

An entry is a matrix-vector product with every weight, which takes as long as the weights take to come from memory, and
torch's calls take as long again. A weight of 8 bits comes in half the time of bfloat16's, and a draft of a few million
of them stays in a core's own cache from one layer to the next. What the draft loses by rounding, 0.4% of a row's
largest weight at most, it may: the target decides what is kept.

Each output of a matrix has a scale (symmetric quantization by channel, as in LLM.int8(), Dettmers et al. 2022, section
2.1.1); activations stay in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rlhfspec_mega.compiled import inlined, vectorized
from rlhfspec_mega.models.host_floats import Floats, Single, host_array, load, store
from rlhfspec_mega.sampling.exponential import exponential

Singles = NDArray[np.float32]
Weights = NDArray[np.int8]
Ints = NDArray[np.int64]

_TOGETHER = 4  # entries that are multiplied by a weight once it is loaded
# Weights of a draft that fit a core's cache, and entries up to which the compiled functions are quicker than products
# of whole weights. Measured on a Xeon with AMX: hidden sizes 128 and 384 (0.2 to 2 million weights), 768 and 2048.
_FEW_WEIGHTS = 2**22
_MOST_ENTRIES = {torch.float32: 16, torch.bfloat16: 8}
_MOST_OF_LARGE = {torch.float32: 4, torch.bfloat16: 1}
_ROWS_AT_ONCE = 4096  # of a matrix that is rounded
_LARGEST = 127.0
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)


@dataclass(frozen=True)
class EightBit:
    """A matrix [out, in] as whole numbers, and the scale [out] of each of its rows."""

    weights: Weights
    scales: Singles

    @classmethod
    def of(cls, matrix: torch.Tensor) -> EightBit:
        pieces = [_rounded(rows) for rows in matrix.split(_ROWS_AT_ONCE)]
        weights, scales = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        return cls(weights.numpy(), scales.numpy())


def _rounded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = rows.float()
    scales = values.abs().amax(dim=1).div_(_LARGEST)
    steps = scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    return (values / steps).round_().to(torch.int8), scales


def most_entries(matrices: Sequence[torch.Tensor]) -> int:
    """Entries up to which the compiled functions are quicker than products of whole weights of these matrices."""
    small = sum(matrix.numel() for matrix in matrices) <= _FEW_WEIGHTS
    return (_MOST_ENTRIES if small else _MOST_OF_LARGE).get(matrices[0].dtype, 0)


@dataclass(frozen=True)
class HostDraft:
    """A draft's weights as the compiled functions below read them; its methods are those of `DraftModel`.

    Attributes:
        embedding: the target's; it and the weights of norms are the memory of the draft's and the target's tensors.
    """

    embedding: Floats
    input_norm: Floats
    hidden_norm: Floats
    post_norm: Floats
    norm: Floats
    fc: EightBit
    qkv: EightBit
    out: EightBit
    gate_up: EightBit
    down: EightBit
    head: EightBit
    epsilon: np.float32

    @classmethod
    def of(
        cls,
        embedding: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        matrices: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        epsilon: float,
    ) -> HostDraft:
        """Of weights in the order of the attributes."""
        input_norm, hidden_norm, post_norm, norm = map(host_array, norms)
        fc, qkv, out, gate_up, down, head = map(EightBit.of, matrices)
        own = input_norm, hidden_norm, post_norm, norm, fc, qkv, out, gate_up, down, head
        return cls(host_array(embedding), *own, np.float32(epsilon))

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """States [N, hidden] of the target's tapped outputs [N, 3 * hidden]."""
        found = features.new_empty(len(features), len(self.fc.weights))
        _product(host_array(features), self.fc.weights, self.fc.scales, host_array(found))
        return found

    def entries_in(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values [N, rows of the QKV matrix] of entries; arguments as `DraftModel.advance`."""
        found = states.new_empty(len(states), len(self.qkv.weights))
        norms, matrix = (self.input_norm, self.hidden_norm, self.epsilon), (self.qkv.weights, self.qkv.scales)
        _entries_in(tokens.numpy(), host_array(states), self.embedding, *norms, *matrix, host_array(found))
        return found

    def entries_out(self, states: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """Output states [N, hidden] of entries whose attention gave `mixed` [N, heads x head_dim]."""
        found = torch.empty_like(states)
        out, gate_up, down = ((one.weights, one.scales) for one in (self.out, self.gate_up, self.down))
        given = host_array(states), host_array(mixed), self.post_norm, self.epsilon
        _entries_out(*given, *out, *gate_up, *down, host_array(found))
        return found

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """float32 [N, draft vocabulary]."""
        found = torch.empty(len(states), len(self.head.weights))
        matrix = self.head.weights, self.head.scales
        _normed_product(host_array(states), self.norm, self.epsilon, *matrix, found.numpy())
        return found


@vectorized
def _product(x: Floats, weights: Weights, scales: Singles, found: Floats) -> None:
    values, sums = np.empty(x.shape, np.float32), np.empty(found.shape, np.float32)
    for row in range(len(x)):
        for place in range(x.shape[1]):
            values[row, place] = load(x[row], place)
    _multiply(values, weights, scales, sums)
    for row in range(len(x)):
        store(found[row], sums[row])


@vectorized
def _normed_product(
    states: Floats, norm: Floats, eps: Single, weights: Weights, scales: Singles, found: Singles
) -> None:
    values = np.empty(states.shape, np.float32)
    for row in range(len(states)):
        _normalize(states[row], norm, eps, values[row])
    _multiply(values, weights, scales, found)


@vectorized
def _entries_in(
    tokens: Ints,
    states: Floats,
    embedding: Floats,
    of_tokens: Floats,
    of_states: Floats,
    eps: Single,
    weights: Weights,
    scales: Singles,
    found: Floats,
) -> None:
    count, width = states.shape
    values, sums = np.empty((count, 2 * width), np.float32), np.empty(found.shape, np.float32)
    for row in range(count):
        _normalize(embedding[tokens[row]], of_tokens, eps, values[row, :width])
        _normalize(states[row], of_states, eps, values[row, width:])
    _multiply(values, weights, scales, sums)
    for row in range(count):
        store(found[row], sums[row])


@vectorized
def _entries_out(
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
    _multiply(attended, out, out_scales, x)
    for row in range(count):
        for place in range(hidden):
            x[row, place] += load(states[row], place)
        _normalize(x[row], norm, eps, normed[row])
    _multiply(normed, gate_up, gate_up_scales, gates)
    for row in range(count):
        gate, up, product_of = gates[row, :inner], gates[row, inner:], products[row]
        for place in range(inner):
            size = np.abs(gate[place])
            small = exponential(-size)  # silu(g) = g s(g), with s(g) = 1 / (1 + exp(-g))
            sigmoid = (_ONE if gate[place] >= _ZERO else small) / (_ONE + small)
            product_of[place] = gate[place] * sigmoid * up[place]
    _multiply(products, down, down_scales, added)
    for row in range(count):
        for place in range(hidden):
            x[row, place] += added[row, place]
        store(found[row], x[row])


@inlined
def _normalize(values: Floats, weight: Floats, eps: Single, normed: Singles) -> None:
    """RMSNorm of a vector."""
    width, squares = len(values), np.float32(0.0)
    for place in range(width):
        squares += load(values, place) * load(values, place)
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(width) + eps)
    for place in range(width):
        normed[place] = load(values, place) * scale * load(weight, place)


@inlined
def _multiply(x: Singles, weights: Weights, scales: Singles, found: Singles) -> None:
    """x W^T: up to four entries at once, or four outputs of a single one."""
    count, outputs, inputs = len(x), len(weights), x.shape[1]
    for first in range(0, count, _TOGETHER):
        if first + 1 == count:
            _multiply_one(x[first], weights, scales, found[first])
        else:
            # The last entry stands in for those that a group lacks: weights are loaded once all the same.
            e1, e2, e3 = min(first + 1, count - 1), min(first + 2, count - 1), min(first + 3, count - 1)
            x0, x1, x2, x3 = x[first], x[e1], x[e2], x[e3]
            for output in range(outputs):
                row = weights[output]
                sum0 = sum1 = sum2 = sum3 = np.float32(0.0)
                for place in range(inputs):
                    weight = np.float32(row[place])
                    sum0 += x0[place] * weight
                    sum1 += x1[place] * weight
                    sum2 += x2[place] * weight
                    sum3 += x3[place] * weight
                scale = scales[output]
                found[first, output], found[e1, output] = sum0 * scale, sum1 * scale
                found[e2, output], found[e3, output] = sum2 * scale, sum3 * scale


@inlined
def _multiply_one(values: Singles, weights: Weights, scales: Singles, found: Singles) -> None:
    outputs, inputs = weights.shape
    whole = outputs - outputs % 4
    for output in range(0, whole, 4):
        row0, row1 = weights[output], weights[output + 1]
        row2, row3 = weights[output + 2], weights[output + 3]
        sum0 = sum1 = sum2 = sum3 = np.float32(0.0)
        for place in range(inputs):
            value = values[place]
            sum0 += value * np.float32(row0[place])
            sum1 += value * np.float32(row1[place])
            sum2 += value * np.float32(row2[place])
            sum3 += value * np.float32(row3[place])
        found[output], found[output + 1] = sum0 * scales[output], sum1 * scales[output + 1]
        found[output + 2], found[output + 3] = sum2 * scales[output + 2], sum3 * scales[output + 3]
    for output in range(whole, outputs):
        row, total = weights[output], np.float32(0.0)
        for place in range(inputs):
            total += values[place] * np.float32(row[place])
        found[output] = total * scales[output]
