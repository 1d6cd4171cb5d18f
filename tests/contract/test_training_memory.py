"""The memory of a rank that trains: what planning says of it, against what its tensors take."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.memory_plan import compare
from rlhfspec_mega.config.schema.training import ActorConfig
from rlhfspec_mega.models.shape import ModelShape


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("tensor", "stages", "ranks"), [(1, 1, 1), (2, 1, 2), (1, 2, 2), (1, 1, 2)])
@pytest.mark.parametrize(("architecture", "tied"), [("llama", True), ("qwen3", False)])
def test_memory_is_as_planned(
    architecture: str, tied: bool, tensor: int, stages: int, ranks: int, dtype: str, recompute: bool, tmp_path: Path
) -> None:
    """Tensors that stay are planned exactly, activations within a tenth."""
    shape = ModelShape(architecture, 192, 4, 6, 2, 32, 520, 3000, 256, 1e4, 1e-5, tied)
    config = ActorConfig(tensor, stages, dtype=dtype, recompute=recompute, logprob_chunk=64)
    for planned, counted in compare(shape, config, ranks, (3, 100), tmp_path):
        assert counted["activations"] == pytest.approx(planned["activations"], rel=0.1)
        assert counted["weights"] == planned["weights"] and counted["gradients"] == planned["gradients"]
        assert 0.9 * planned["optimizer"] < counted["optimizer"] <= planned["optimizer"], "the fullest rank is planned"
