"""On a GPU: the reference's weights are on the device during a call only, and its log-probs are the CPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhfspec_mega.rollout.scoring import Scorer
from tests.e2e.conftest import SHAPE, make_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_the_device_is_left_as_it_was(tmp_path: Path) -> None:
    path, call = make_model(tmp_path / "model"), [([1, 2, 3], list(range(4, 40))), ([5], [6, 7])]
    scorers = {
        device: Scorer(
            path, max_positions=SHAPE.max_positions, dtype=torch.float32, device=device, max_tokens=64, logit_chunk=16
        )
        for device in ("cpu", "cuda")
    }
    expected, before = scorers["cpu"].logprobs(call, 0.8), torch.cuda.memory_allocated()
    for _ in range(2):
        for one, other in zip(scorers["cuda"].logprobs(call, 0.8), expected, strict=True):
            assert one == pytest.approx(other, abs=1e-4)
        assert torch.cuda.memory_allocated() == before
