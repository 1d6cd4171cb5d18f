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

from rlhfspec_mega.compiled import vectorized
from rlhfspec_mega.models import host_cpu
from rlhfspec_mega.models.host_floats import Floats, Single, host_array, store
from rlhfspec_mega.models.host_kernels import normalize
from rlhfspec_mega.models.host_layer import (
    HostMatrix,
    Singles,
    Weights,
    after_attention,
    multiply,
    normed_product,
    product,
)

Ints = NDArray[np.int64]

# Weights of a draft that fit a core's cache, and entries up to which the compiled functions are quicker than products
# of whole weights. Measured with hidden sizes 128 and 384 (0.2 to 2 million weights), in float32 on an EPYC with AVX2,
# else on a Xeon with AMX, where 768 and 2048 are the large ones. Without AMX products of bfloat16 gain less from many
# entries: on an EPYC with AVX512-BF16, 12 entries of small's draft take 0.81 of their time, and 16 take 0.96; of one
# with an MLP three times as wide 8 take 0.86, and 12 take 1.05.
_FEW_WEIGHTS = 2**22
_MOST_ENTRIES = {torch.float32: 48, torch.bfloat16: 8}
_MOST_WITHOUT_AMX = 10  # in bfloat16
_MOST_OF_LARGE = {torch.float32: 4, torch.bfloat16: 1}
_ROWS_AT_ONCE = 4096  # of a matrix that is rounded
_LARGEST = 127.0


def in_eight_bits(matrix: torch.Tensor) -> HostMatrix:
    """A matrix [out, in] rounded to whole numbers of 8 bits."""
    pieces = [_rounded(rows) for rows in matrix.split(_ROWS_AT_ONCE)]
    weights, scales = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return HostMatrix(weights.numpy(), scales.numpy())


def _rounded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = rows.float()
    scales = values.abs().amax(dim=1).div_(_LARGEST)
    steps = scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    return (values / steps).round_().to(torch.int8), scales


def most_entries(matrices: Sequence[torch.Tensor]) -> int:
    """Entries up to which the compiled functions are quicker than products of whole weights of these matrices."""
    small, dtype = sum(matrix.numel() for matrix in matrices) <= _FEW_WEIGHTS, matrices[0].dtype
    if small and dtype == torch.bfloat16 and not host_cpu.has_amx():
        return _MOST_WITHOUT_AMX
    return (_MOST_ENTRIES if small else _MOST_OF_LARGE).get(dtype, 0)


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
    fc: HostMatrix
    qkv: HostMatrix
    out: HostMatrix
    gate_up: HostMatrix
    down: HostMatrix
    head: HostMatrix
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
        fc, qkv, out, gate_up, down, head = map(in_eight_bits, matrices)
        own = input_norm, hidden_norm, post_norm, norm, fc, qkv, out, gate_up, down, head
        return cls(host_array(embedding), *own, np.float32(epsilon))

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """States [N, hidden] of the target's tapped outputs [N, 3 * hidden]."""
        return product(features, self.fc)

    def entries_in(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values [N, rows of the QKV matrix] of entries; arguments as `DraftModel.advance`."""
        return self._entries_in(tokens, states, self.qkv)

    def keys_values_in(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Keys and values alone, [N, their rows]."""
        queries = self.out.weights.shape[1]
        return self._entries_in(tokens, states, HostMatrix(self.qkv.weights[queries:], self.qkv.scales[queries:]))

    def _entries_in(self, tokens: torch.Tensor, states: torch.Tensor, matrix: HostMatrix) -> torch.Tensor:
        found = states.new_empty(len(states), len(matrix.weights))
        norms = self.input_norm, self.hidden_norm, self.epsilon
        weights = matrix.weights, matrix.scales
        _entries_in(tokens.numpy(), host_array(states), self.embedding, *norms, *weights, host_array(found))
        return found

    def entries_out(self, states: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """Output states [N, hidden] of entries whose attention gave `mixed` [N, heads x head_dim]."""
        return after_attention(states, mixed, self.out, self.post_norm, self.epsilon, self.gate_up, self.down)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """float32 [N, draft vocabulary]."""
        return normed_product(states, self.norm, self.epsilon, self.head)


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
        normalize(embedding[tokens[row]], of_tokens, eps, values[row, :width])
        normalize(states[row], of_states, eps, values[row, width:])
    multiply(values, weights, scales, sums)
    for row in range(count):
        store(found[row], sums[row])
