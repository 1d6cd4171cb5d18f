"""A pool of KV that is too small for what runs: SGLang retracts requests, and no token changes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.sglang_engines import SHARED_GPU, finish, ours, settings
from rlhfspec_mega.rollout.sglang_engine.choice import NOT_FIXED
from rlhfspec_mega.rollout.sglang_engine.shapes import DraftShapes, chains, trees
from rlhfspec_mega.types import GenerationRequest, GenerationResult
from tests.near_tie import assert_same
from tests.sglang.support import FP32

RETRACTED = "Retract requests"  # as SGLang's log says it
# Tokens of KV for 32 slots, each of which may take 300; and requests let in as if they needed none for their answers.
TIGHT = {"max_total_tokens": 900, "schedule_conservativeness": 0.0}


@pytest.mark.parametrize("shapes", [chains(4), trees(8, 3, 3)], ids=["chains", "trees"])
def test_retraction(
    shapes: DraftShapes,
    made: tuple[Path, Path],
    requests: list[GenerationRequest],
    wanted: dict[str, GenerationResult],
    judge: Callable[[list[int]], torch.Tensor],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What forked processes write goes elsewhere.
    monkeypatch.setattr("sglang.srt.entrypoints.engine.mp", multiprocessing)
    engine, control = ours(settings(*made, **FP32, shapes=shapes, options=SHARED_GPU | TIGHT), tmp_path / "engine")
    assert control is not None
    for count in (NOT_FIXED, 0, shapes.counts[-1]):
        control.force(count)
        assert_same(wanted, finish(engine, requests), requests, judge)
    output = capfd.readouterr()
    assert (output.out + output.err).count(RETRACTED) >= 3
