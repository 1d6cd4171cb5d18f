"""The draft's compiled layer against float64 with the same 8-bit weights, and against torch's with the whole ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfspec_mega.draft.host_draft import HostDraft, in_eight_bits, most_entries
from rlhfspec_mega.draft.model import DraftModel
from rlhfspec_mega.draft.shape import draft_shape
from rlhfspec_mega.models import host_cpu
from rlhfspec_mega.models.host_layer import HostMatrix
from rlhfspec_mega.models.transformer import Transformer
from tests.e2e.conftest import SHAPE as TINY
from tests.unit.test_torch_engine import one_thread

__all__ = ["one_thread"]

# Sizes that are multiples of nothing: every loop has a rest.
SHAPE = replace(
    TINY, hidden_size=52, num_layers=6, num_heads=3, num_kv_heads=1, head_dim=18, ffn_size=70, vocab_size=61
)


def make(dtype: torch.dtype) -> tuple[DraftModel, HostDraft]:
    generator = torch.Generator().manual_seed(3)
    target = Transformer(SHAPE, max_positions=32, dtype=dtype, device="cpu")
    draft = DraftModel(draft_shape(SHAPE), target)
    for tensor in (target.embedding, *draft.tensors().values()):
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * (0.3 if tensor.dim() == 2 else 1.0))
    draft.weights_changed()
    assert draft._host is not None
    return draft, draft._host


def rounded(matrix: HostMatrix) -> torch.Tensor:
    return torch.from_numpy(matrix.weights).double() * torch.from_numpy(matrix.scales).double()[:, None]


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight.double(), SHAPE.norm_eps)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.floats(1e-30, 1e30), st.integers(0, 100))
def test_a_weight_is_off_by_half_a_step_at_most(rows: int, columns: int, size: float, seed: int) -> None:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * size
    matrix[seed % rows] = 0.0
    found = in_eight_bits(matrix)
    steps = torch.from_numpy(found.scales).double()[:, None]
    assert ((rounded(found) - matrix.double()).abs() <= 0.501 * steps).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entries", range(1, 10))
def test_it_computes_what_torch_does(entries: int, dtype: torch.dtype) -> None:
    draft, host = make(dtype)
    generator = torch.Generator().manual_seed(entries)
    tokens = torch.randint(0, SHAPE.vocab_size, (entries,), generator=generator)
    states, mixed, features = (
        torch.randn(entries, width, generator=generator).to(dtype)
        for width in (SHAPE.hidden_size, SHAPE.num_heads * SHAPE.head_dim, 3 * SHAPE.hidden_size)
    )
    wide = states.double()
    inputs = torch.cat(
        (norm(draft._target.embedding[tokens].double(), draft.input_norm), norm(wide, draft.hidden_norm)), 1
    )
    x = wide + mixed.double() @ rounded(host.out).T
    gate, up = (norm(x, draft.post_norm) @ rounded(host.gate_up).T).chunk(2, dim=-1)
    x = x + (torch.nn.functional.silu(gate) * up) @ rounded(host.down).T
    wanted = {
        "fuse": (host.fuse(features), features.double() @ rounded(host.fc).T, draft._packed.linear(features, draft.fc)),
        "in": (
            host.entries_in(tokens, states),
            inputs @ rounded(host.qkv).T,
            draft._entries_in(tokens, states, draft.qkv),
        ),
        "out": (host.entries_out(states, mixed), x, draft._entries_out(states, mixed)),
    }
    queries = SHAPE.num_heads * SHAPE.head_dim
    keys_values = host.keys_values_in(tokens, states), wanted["in"][1][:, queries:], wanted["in"][2][:, queries:]
    wanted["keys and values"] = keys_values
    normed = norm(wide, draft.norm)
    wanted["logits"] = host.logits(states), normed @ rounded(host.head).T, (normed @ draft.head.double().T)
    for name, (found, exact, whole) in wanted.items():
        same = 1e-5 if found.dtype == torch.float32 else 1e-2
        assert relative_error(found, exact) < same, name
        assert relative_error(found, whole) < 0.03, f"{name}: rounding to 8 bits loses too much"


@pytest.mark.parametrize(
    ("dtype", "amx", "most"),
    [(torch.float32, True, 48), (torch.float32, False, 48), (torch.bfloat16, True, 8), (torch.bfloat16, False, 10)],
)
def test_more_entries_are_computed_with_whole_weights(
    dtype: torch.dtype, amx: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_cpu, "has_amx", lambda: amx)
    draft, host = make(dtype)
    features = torch.randn(most + 1, 3 * SHAPE.hidden_size).to(dtype)
    assert torch.equal(draft.fuse(features), draft._packed.linear(features, draft.fc))
    assert torch.equal(draft.fuse(features[:most]), host.fuse(features[:most]))


@pytest.mark.parametrize("amx", [True, False])
def test_with_many_weights_fewer_entries_are(amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cpu, "has_amx", lambda: amx)
    for dtype, most in ((torch.float32, 4), (torch.bfloat16, 1), (torch.float64, 0)):
        assert most_entries([torch.empty(2**11, 2**12, dtype=dtype, device="meta")]) == most


def test_copies_follow_the_weights() -> None:
    draft, _ = make(torch.float32)
    features = torch.randn(1, 3 * SHAPE.hidden_size)
    before = draft.fuse(features)
    draft.fc.mul_(2.0)
    draft.weights_changed()
    assert torch.allclose(draft.fuse(features), 2.0 * before)
    torch.set_num_threads(2)
    draft.fc.mul_(2.0)
    draft.weights_changed()
    assert torch.equal(draft.fuse(features), draft._packed.linear(features, draft.fc))


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
