"""Compiled layers of a target against torch's in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfspec_mega.models.host_layer import HostLayer, HostMatrix, few_rows, product
from rlhfspec_mega.models.transformer import Transformer, causal_attention
from tests.e2e.conftest import SHAPE as TINY
from tests.unit.test_torch_engine import one_thread

__all__ = ["one_thread"]

# Sizes that are multiples of nothing: every loop has a rest.
SHAPE = replace(TINY, hidden_size=52, num_heads=3, num_kv_heads=1, head_dim=18, ffn_size=70, vocab_size=61)
SHAPES = {
    "llama": SHAPE,
    "biases": replace(SHAPE, architecture="qwen2"),
    "norms of queries and keys": replace(SHAPE, architecture="qwen3", tie_embeddings=True),
}


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 14), st.integers(1, 14), st.integers(1, 40), st.integers(0, 100))
def test_a_product_is_torchs(rows: int, outputs: int, inputs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, matrix = torch.randn(rows, inputs, generator=generator), torch.randn(outputs, inputs, generator=generator)
    found = product(x, HostMatrix.of(matrix)).double()
    assert torch.allclose(found, x.double() @ matrix.double().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 32, 33])
def test_a_forward_is_torchs(rows: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, generator = SHAPES[name], torch.Generator().manual_seed(rows)
    model = Transformer(shape, max_positions=64, dtype=torch.float32, device="cpu")
    exact = Transformer(shape, max_positions=64, dtype=torch.float64, device="cpu")
    for key, tensor in model.hf_tensors().items():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * (0.3 if tensor.dim() == 2 else 1.0))
        exact.hf_tensors()[key].copy_(tensor)
    model.weights_changed()
    assert model.few_rows == 32 and exact.few_rows == 0
    computed, after = list[int](), HostLayer.after_attention
    monkeypatch.setattr(
        HostLayer, "after_attention", lambda self, x, mixed: computed.append(len(x)) or after(self, x, mixed)
    )
    tokens = torch.randint(shape.vocab_size, (1, rows), generator=generator)
    found, expected = (
        one.logits(one.hidden(tokens, torch.arange(rows)[None], causal_attention(shape))).double()
        for one in (model, exact)
    )
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    assert computed == ([rows] * shape.num_layers if rows <= 32 else []), "compiled functions compute few rows"


def test_large_targets_and_those_in_bfloat16_are_left_to_torch() -> None:
    assert few_rows(10**6, torch.float32) > 0
    assert few_rows(10**8, torch.float32) == few_rows(10**6, torch.bfloat16) == 0
