"""Attention over packed sequences against each sequence alone, in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import rlhfspec_mega.megatron.quick_start  # noqa: F401
from rlhfspec_mega.megatron.packed_sequences import attend, packed_sequences


@settings(max_examples=60)
@given(st.lists(st.integers(1, 23), min_size=1, max_size=9), st.sampled_from([1, 2, 4]))
def test_each_sequence_sees_itself_alone(lengths: list[int], kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    q, k, v = (
        torch.randn(sum(lengths), heads, 6, dtype=torch.float64, generator=generator, requires_grad=True)
        for heads in (4, kv_heads, kv_heads)
    )
    packed = packed_sequences(lengths, torch.device("cpu"))
    assert packed.cu_seqlens_q.tolist() == [0, *itertools.accumulate(lengths)] and packed.max_seqlen_kv == max(lengths)
    weights = torch.randn(sum(lengths), 24, dtype=torch.float64, generator=generator)
    (attend(q, k, v, packed.runs) * weights).sum().backward()
    found = [tensor.grad.clone() for tensor in (q, k, v)]
    for tensor in (q, k, v):
        tensor.grad = None
    alone = []
    for first, last in itertools.pairwise(packed.cu_seqlens_q.tolist()):
        own = [tensor[first:last].transpose(0, 1).repeat_interleave(4 // tensor.shape[1], 0) for tensor in (q, k, v)]
        alone.append(F.scaled_dot_product_attention(*own, is_causal=True).transpose(0, 1).flatten(1))
    (torch.cat(alone) * weights).sum().backward()
    assert torch.allclose(attend(q, k, v, packed.runs), torch.cat(alone), atol=1e-12)
    for tensor, gradient in zip((q, k, v), found, strict=True):
        assert torch.allclose(tensor.grad, gradient, atol=1e-12)


@pytest.mark.parametrize(("lengths", "runs"), [([8, 8, 8], 1), ([10, 9, 7], 1), ([40, 10, 9, 1], 3)])
def test_sequences_of_similar_lengths_are_computed_together(lengths: list[int], runs: int) -> None:
    """One call of the kernel each, in which at most a fifth is padding."""
    found = packed_sequences(lengths, torch.device("cpu")).runs
    assert len(found) == runs
    for run in found:
        assert run.cells is None or run.tokens / len(run.cells) >= 0.8
