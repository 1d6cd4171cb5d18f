"""Copies of weights in a layout that suits products with few rows on a CPU: decoding and verification.

A BLAS product packs the whole weight matrix anew in every call. At one row (a matrix-vector product) it does not, so
two rows cost nearly twice as much as one, which speculative decoding would pay in every step. Two layouts help:

* The transpose [in, out]. MKL multiplies it without packing where it uses AVX-512, which it does on Intel's CPUs: with
  an fp32 matrix [2304, 384] 8 rows cost 1.2 of one, instead of 2.9. Small matrices gain on any core: [768, 128] takes
  half the time at 8 rows.
* oneDNN's own, packed once. With AVX2, 2 rows of [2304, 384] cost 1.1 and 8 rows 1.6 of one, instead of 1.8 and 2.5.
  With AVX-512 on an EPYC all matrices of model small take 3.2 ms for 4 to 6 rows, 4.3 for 8 and 9.9 for 32, where their
  transposes take 6.5, 7.3 and 14. A call costs 10 to 20 microseconds more than with the transpose, so that only large
  matrices gain. In bfloat16 it is the quickest product at any number of rows: on a core with AMX, 8 rows cost 1.03 and
  32 rows 1.16 of one, with AVX512-BF16 alone 1.5 and 3.5 (1.1 and 2.5 of matrices that no cache holds).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from rlhfspec_mega.models import host_cpu

_MOST_AVX2_ROWS = 64  # with more rows, packing is a small part of a product's time
_LEAST_FP32_SIZE = 2**18  # weights; with fewer, oneDNN's call overhead exceeds the gain
_TUNED_ROWS = 8  # the number of rows that the packed layout is tuned for
# oneDNN makes a kernel for every number of rows, which takes as long as several products of few rows, and keeps about a
# thousand: verified tokens would come in more numbers than that. So from some number on there are kernels for its
# multiples only: with AMX for those of a tile's rows, of which a part takes as long as all.
_TILE_ROWS = 16
_EACH_ROWS, _PART_ROWS, _MOST_PART_ROWS = 32, 4, 64  # with AVX-512 alone
_LEAST_FP32_ROWS = 4  # the same: fewer take longer, as their sums are too few to keep a core busy
_MOST_MADE = 2**22  # weights; of a larger matrix a product takes as long as a kernel


class PackedWeights:
    """Copies of weights on a CPU, by the tensors they were made from; not used on other devices.

    bfloat16 weights are packed only if oneDNN can compute in bfloat16.
    """

    def __init__(self) -> None:
        self._packed: dict[int, torch.Tensor] = {}  # in oneDNN's layout
        self._transposed: dict[int, torch.Tensor] = {}

    @property
    def bytes(self) -> int:
        """Bytes of all copies."""
        copies = (*self._packed.values(), *self._transposed.values())
        return sum(copy.numel() * copy.element_size() for copy in copies)

    @torch.inference_mode()
    def pack(self, weights: Iterable[torch.Tensor]) -> None:
        """Copy these matrices [out, in]; call it again after they have changed."""
        for weight in weights:
            if _suits_onednn(weight):
                self._packed[id(weight)] = torch.ops.mkldnn._reorder_linear_weight(weight, _TUNED_ROWS)
            elif weight.device.type == "cpu" and weight.dtype == torch.float32:
                self._transposed[id(weight)] = weight.t().contiguous()

    @torch.inference_mode()
    def make_kernels(self, products: Iterable[tuple[torch.Tensor, torch.Tensor | None]], most_rows: int) -> None:
        """Have oneDNN make its kernels for all numbers of rows up to this one.

        A first product with a number of rows takes a millisecond, or several, longer than later ones. Of large matrices
        that is little.

        Args:
            products: weight and bias of one product of each kind.
        """
        for weight, bias in products:
            if id(weight) in self._packed and weight.numel() <= _MOST_MADE:
                wanted = [rows for rows in range(1, most_rows + 1) if _onednn_is_quicker(rows, weight.dtype)]
                for rows in sorted({padded_rows(rows, weight.dtype) for rows in wanted}):
                    self.linear(weight.new_zeros((rows, weight.shape[1])), weight, bias)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T + b for x [rows, in], with the copy if there is one and it is faster."""
        transposed = self._transposed.get(id(weight))
        if transposed is not None:
            return torch.mm(x, transposed) if bias is None else torch.addmm(bias, x, transposed)
        rows = len(x)
        packed = self._packed.get(id(weight)) if _onednn_is_quicker(rows, x.dtype) else None
        if packed is None:
            return F.linear(x, weight, bias)
        if more := padded_rows(rows, x.dtype) - rows:
            x = F.pad(x, (0, 0, 0, more))
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")[:rows]

    def added(self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """residual + x W^T, for x [rows, in]."""
        if id(weight) in self._packed:
            return self.linear(x, weight).add_(residual)
        transposed = self._transposed.get(id(weight))
        return torch.addmm(residual, x, weight.t() if transposed is None else transposed)


def padded_rows(rows: int, dtype: torch.dtype) -> int:
    """Rows of oneDNN's product that computes so many."""
    in_tiles = dtype != torch.float32 and (host_cpu.has_amx() or not host_cpu.has_avx512())
    if in_tiles:
        least, each, part = 1, _TILE_ROWS, _TILE_ROWS
    elif host_cpu.has_avx512():
        least, each = _LEAST_FP32_ROWS if dtype == torch.float32 else 1, _EACH_ROWS
        part = _PART_ROWS if rows <= _MOST_PART_ROWS else _TILE_ROWS
    else:
        return rows
    return max(rows, least) if rows <= each else rows + -rows % part


def _onednn_is_quicker(rows: int, dtype: torch.dtype) -> bool:
    return 1 < rows <= _MOST_AVX2_ROWS or dtype != torch.float32 or host_cpu.has_avx512()


def _suits_onednn(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32 and weight.numel() >= _LEAST_FP32_SIZE and not host_cpu.mkl_has_avx512()
