"""The memory of a rank that trains: what planning says of it, against what its tensors take."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.memory_plan import compare
from rlhfspec_mega.config.schema.training import DTYPES, ActorConfig
from rlhfspec_mega.models.shape import ModelShape

LAYOUTS = [(1, 1, 1), (2, 1, 2), (1, 2, 2), (1, 1, 2)]  # TP, PP, ranks
# Each layout with each dtype, each recomputing once; all 16 are compared by python -m benchmarks.memory_plan.
CASES = [
    ("llama", *layout, dtype, (at + number) % 2 == 1)
    for at, layout in enumerate(LAYOUTS)
    for number, dtype in enumerate(DTYPES)
]
CASES += [("qwen3", *layout, "bfloat16", False) for layout in LAYOUTS[1:3]]


@pytest.mark.parametrize(("architecture", "tensor", "stages", "ranks", "dtype", "recompute"), CASES)
def test_memory_is_as_planned(
    architecture: str, tensor: int, stages: int, ranks: int, dtype: str, recompute: bool, tmp_path: Path
) -> None:
    """Tensors that stay are planned exactly, activations within a tenth."""
    shape = ModelShape(
        architecture, 192, 4, 6, 2, 32, 520, 3000, 256, 1e4, 1e-5, tie_embeddings=architecture == "llama"
    )
    config = ActorConfig(tensor, stages, dtype=dtype, recompute=recompute, logprob_chunk=64)
    for planned, counted in compare(shape, config, ranks, (3, 100), tmp_path):
        assert counted["activations"] == pytest.approx(planned["activations"], rel=0.1)
        assert counted["weights"] == planned["weights"] and counted["gradients"] == planned["gradients"]
        assert 0.9 * planned["optimizer"] < counted["optimizer"] <= planned["optimizer"], "the fullest rank is planned"
