"""Identity with the torch engine for every kind of model and draft, and over tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.sglang_engines import DEVICE, finish, ours, settings
from rlhfspec_mega.draft.directory import load_draft, write_draft
from rlhfspec_mega.draft.shape import draft_shape, draft_tensors
from rlhfspec_mega.models.hf_config import read_shape
from rlhfspec_mega.rollout.sglang_engine.choice import NOT_FIXED
from rlhfspec_mega.rollout.sglang_engine.shapes import trees
from tests.e2e.conftest import SHAPE, make_model
from tests.near_tie import assert_same
from tests.sglang.conftest import judge_of, requests_of, torch_results
from tests.sglang.support import FP32, acceptance


def of_architecture(architecture: str, tied: bool, root: Path) -> tuple[Path, Path]:
    """A random model and draft."""
    sizes = {"hidden_size": 64, "head_dim": 16, "num_layers": 6, "max_positions": 512}
    shape = replace(SHAPE, architecture=architecture, tie_embeddings=tied, **sizes)
    of_draft = draft_shape(shape)
    generator = torch.Generator().manual_seed(1)
    random = {info.name: 0.05 * torch.randn(info.shape, generator=generator) for info in draft_tensors(of_draft)}
    write_draft(root / "draft", of_draft, random)
    return make_model(root / "model", shape), root / "draft"


def with_reduced_vocabulary(made: tuple[Path, Path], root: Path) -> tuple[Path, Path]:
    """The trained pair, the draft's vocabulary without half of the bytes."""
    shape = read_shape(made[0])
    of_draft, tensors = load_draft(made[1], shape)
    ids = torch.tensor([*range(128), *range(256, shape.vocab_size)])
    tensors = dict(tensors) | {"lm_head.weight": tensors["lm_head.weight"][ids]}
    write_draft(root / "draft", replace(of_draft, vocab_size=len(ids)), tensors, ids)
    return made[0], root / "draft"


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("qwen2", {}),
        ("qwen3 untied", {}),
        ("llama untied", {"shapes": trees(12, 4, 4)}),
        ("reduced vocabulary", {"prefill_chunk": 32}),
        ("trained", {"tensor_parallel": 2}),
        ("trained", {"tensor_parallel": 2, "shapes": trees(12, 4, 4), "prefill_chunk": 32}),
    ],
    ids=["qwen2", "qwen3_untied", "llama_untied_trees", "reduced_vocabulary_chunked", "tp2", "tp2_trees_chunked"],
)
def test_identity_of_models(kind: str, given: dict[str, Any], made: tuple[Path, Path], tmp_path: Path) -> None:
    if DEVICE == "cuda" and torch.cuda.device_count() < given.get("tensor_parallel", 1):
        pytest.skip("needs as many GPUs as ranks")
    if kind == "trained":
        model, draft = made
    elif kind == "reduced vocabulary":
        model, draft = with_reduced_vocabulary(made, tmp_path)
    else:
        model, draft = of_architecture(kind.split()[0], not kind.endswith("untied"), tmp_path)
    requests = requests_of(model, 8, 64)
    wanted, judge = torch_results(model, requests), judge_of(model)
    engine, control = ours(settings(model, draft, **(FP32 | given)), tmp_path / "engine")
    assert control is not None
    for count in (NOT_FIXED, 5):
        control.force(count)
        assert_same(wanted, finish(engine, requests), requests, judge)
    if kind in ("trained", "reduced vocabulary"):
        assert acceptance(control) > 1.0
