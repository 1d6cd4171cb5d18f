"""Weights in a CPU's own blocked layout, for products with few rows: decoding and verification.

A BLAS product packs the whole weight matrix anew in every call. At one row (a matrix-vector product) it does not, so
two rows cost nearly twice as much as one, which speculative decoding would pay in every step. oneDNN takes weights
that were packed once: with an fp32 matrix [2304, 384], on one core without AVX-512, 2 rows cost 1.1 and 8 rows 1.6 of
one, instead of 1.8 and 2.5. Narrow matrices gain less. In bfloat16, on a core with AMX, 8 rows cost 1.03 and 32 rows
1.16 of one, and a packed product is quicker than another at any number of rows.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

_MOST_FP32_ROWS = 64  # with more rows, packing is a small part of a product's time
_LEAST_FP32_WIDTH = 512  # outputs; with fewer, the call overhead exceeds the gain
_TUNED_ROWS = 8  # the number of rows that the packed layout is tuned for
# Rows of a bfloat16 tile. For every other number of rows oneDNN makes a kernel, which takes as long as several products
# of few rows, and keeps about a thousand: verified tokens would come in more numbers than that.
_TILE_ROWS = 16


class PackedWeights:
    """Packed copies of weights on a CPU, by the tensors they were made from; not used on other devices.

    bfloat16 weights are packed only if oneDNN can compute in bfloat16.
    """

    def __init__(self) -> None:
        self._packed: dict[int, torch.Tensor] = {}

    @torch.inference_mode()
    def pack(self, weights: Iterable[torch.Tensor]) -> None:
        """Pack these matrices [out, in]; call it again after they have changed."""
        for weight in weights:
            if _pays(weight):
                self._packed[id(weight)] = torch.ops.mkldnn._reorder_linear_weight(weight, _TUNED_ROWS)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T + b for x [rows, in], with the packed copy if there is one and it is faster."""
        few = x.dtype != torch.float32 or 1 < len(x) <= _MOST_FP32_ROWS
        packed = self._packed.get(id(weight)) if few else None
        if packed is None:
            return F.linear(x, weight, bias)
        rows = len(x)
        if x.dtype != torch.float32 and rows > _TILE_ROWS:
            x = F.pad(x, (0, 0, 0, -rows % _TILE_ROWS))
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")[:rows]

    def added(self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """residual + x W^T, for x [rows, in]."""
        if id(weight) in self._packed:
            return self.linear(x, weight).add_(residual)
        return torch.addmm(residual, x, weight.t())


def _pays(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32 and len(weight) >= _LEAST_FP32_WIDTH
