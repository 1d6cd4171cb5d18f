"""What an engine computes otherwise in bfloat16 on a CPU, against the same in float32."""

from __future__ import annotations

import collections

import pytest
import torch

from rlhfspec_mega.models import host_cpu, packed_weights
from rlhfspec_mega.models.packed_weights import PackedWeights
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.rollout.torch_engine.cache import CachedAttention, Inputs, KVCache
from tests.unit.test_torch_engine import one_thread

__all__ = ["one_thread"]
SHAPE = ModelShape("llama", 32, 2, 4, 2, 64, 48, 29, 64, 1e4, 1e-6, True)
NEEDS_BFLOAT16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="the CPU cannot compute in bfloat16"
)


def attended(dtype: torch.dtype, counts: list[int]) -> torch.Tensor:
    """Attention of a second layer: row i brings counts[i] inputs and sees i + 3 places and itself."""
    generator = torch.Generator().manual_seed(1)
    cache = KVCache(SHAPE, slots=4, places=20, dtype=dtype, device="cpu")
    cache.kv.copy_(torch.randn(cache.kv.shape, generator=generator))
    rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    columns = torch.cat([torch.arange(count) for count in counts])
    places = 10 + columns
    visible = torch.arange(10 + max(counts)) < rows[:, None] + 3
    visible[torch.arange(len(rows)), places] = True
    inputs = Inputs(rows, places, rows, columns, places, visible, len(counts), max(counts))
    qkv = torch.randn(len(rows), 8, SHAPE.head_dim, generator=generator).to(dtype)
    return CachedAttention(cache, inputs)(1, qkv)


@pytest.mark.parametrize("counts", [[1, 1, 1], [4, 1, 2], [3]])
def test_attention_is_that_of_float32(counts):
    found, expected = attended(torch.bfloat16, counts), attended(torch.float32, counts)
    assert found.dtype == torch.bfloat16 and found.shape == expected.shape
    assert torch.allclose(found.float(), expected, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("avx512, amx", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_numbers_of_rows_are_computed(dtype, avx512, amx, monkeypatch):
    """oneDNN keeps 1024 kernels, those of twelve kinds of matrices among them; little is computed in vain."""
    monkeypatch.setattr(host_cpu, "has_avx512", lambda: avx512)
    monkeypatch.setattr(host_cpu, "has_amx", lambda: amx)
    rows = [count for count in range(1, 513) if packed_weights._onednn_is_quicker(count, dtype)]
    computed = [packed_weights.padded_rows(count, dtype) for count in rows]
    assert computed == sorted(computed) and 12 * len(set(computed)) < 1000
    assert all(count <= found < count + 16 for found, count in zip(computed, rows, strict=True))
    assert [packed_weights.padded_rows(found, dtype) for found in computed] == computed


def test_kernels_are_made_of_all_numbers_of_rows_that_are_computed(monkeypatch):
    """In float32, too; not of matrices so large that a product takes as long."""
    monkeypatch.setattr(host_cpu, "mkl_has_avx512", lambda: False)
    monkeypatch.setattr(host_cpu, "has_avx512", lambda: True)
    packed, made = PackedWeights(), collections.defaultdict(list)
    small, large = torch.zeros(2048, 130), torch.zeros(2**15, 130)
    packed.pack((small, large))
    linear = torch.ops.mkldnn._linear_pointwise

    def recorded(x, *given):
        made[given[0].shape[0]].append(len(x))
        return linear(x, *given)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", recorded)
    packed.make_kernels([(small, None), (large, None)], 70)
    assert made == {2048: [*range(4, 33), *range(36, 65, 4), 80]}
    for rows in range(1, 71):
        packed.linear(torch.zeros(rows, 130), small)
    assert len(set(made[2048])) == 38


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=NEEDS_BFLOAT16)])
@pytest.mark.parametrize("rows", [1, 8, 17, 35, 100])
def test_packed_products_are_those_of_the_weights(rows, dtype):
    """Of few rows and of many, also where rows are filled up, with a bias, and added to a residual; after an update
    those of the new weights.

    Where MKL has no AVX-512 oneDNN takes the wide one; elsewhere, and in bfloat16, both have the same layout.
    """
    generator = torch.Generator().manual_seed(2)
    weight, narrow = torch.zeros(5500, 48, dtype=dtype), torch.zeros(48, 48, dtype=dtype)
    packed = PackedWeights()
    for _ in range(2):
        for matrix in (weight, narrow):
            matrix.copy_(torch.randn(matrix.shape, generator=generator))
        packed.pack((weight, narrow))
        assert packed.bytes == (5500 + 48) * 48 * weight.element_size()
        for matrix in (weight, narrow):
            x = torch.randn(rows, 48, generator=generator).to(dtype)
            other = torch.randn(rows, len(matrix), generator=generator).to(dtype)
            product = x.double() @ matrix.double().t()
            close = {"atol": 1e-4, "rtol": 1e-4} if dtype is torch.float32 else {"atol": 0.1, "rtol": 0.01}
            with torch.inference_mode():
                found = packed.linear(x, matrix), packed.linear(x, matrix, other[0]), packed.added(other, x, matrix)
            for result, expected in zip(found, (product, product + other[0], product + other), strict=True):
                assert torch.allclose(result.double(), expected, **close)
