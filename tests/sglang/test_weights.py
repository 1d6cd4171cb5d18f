"""Updates of target and draft, sleep, and what a share of GPU memory or a pool of KV must hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.sglang_engines import DEVICE, SHARED_GPU, finish, ours, send, settings
from rlhfspec_mega.draft.directory import load_target_ids, read_draft_shape, write_draft
from rlhfspec_mega.draft.shape import draft_tensors
from rlhfspec_mega.models.hf_config import read_shape
from rlhfspec_mega.rollout.sglang_engine.choice import NOT_FIXED
from rlhfspec_mega.types import GenerationRequest, WeightTarget
from tests.e2e.conftest import make_model
from tests.sglang.support import FP32, acceptance, tokens_of, worker


def test_weights(made: tuple[Path, Path], requests: list[GenerationRequest], tmp_path: Path) -> None:
    """An update of the target changes its tokens and back; one of the draft changes acceptance alone, and back."""
    drafting, control = ours(settings(*made, **FP32), tmp_path / "engine")
    assert control is not None
    other, shape = tmp_path / "other", read_shape(made[0])
    make_model(other, shape)
    control.force(3)
    before = tokens_of(finish(drafting, requests))
    usual = acceptance(control)
    send(drafting, other, 1)
    assert tokens_of(finish(drafting, requests)) != before
    send(drafting, made[0], 2)
    assert tokens_of(finish(drafting, requests)) == before
    control.take_tally()
    of_draft = read_draft_shape(made[1], shape)
    random = {info.name: 0.02 * torch.randn(info.shape) for info in draft_tensors(of_draft)}
    write_draft(tmp_path / "draft", of_draft, random, load_target_ids(made[1], of_draft))
    send(drafting, tmp_path / "draft", 1, WeightTarget.DRAFT)
    assert tokens_of(finish(drafting, requests)) == before
    assert acceptance(control) < 0.5 * usual
    send(drafting, made[1], 2, WeightTarget.DRAFT)
    assert tokens_of(finish(drafting, requests)) == before
    assert acceptance(control) == pytest.approx(usual, rel=0.05)
    control.force(NOT_FIXED)


def test_sleep(made: tuple[Path, Path], requests: list[GenerationRequest]) -> None:
    """Memory comes back and goes again; tokens and acceptance outlive it, as the draft does.

    On a CPU what was given back is filled with what is no number: a read of it would show.
    """
    much = {"max_total_tokens": 4_000_000} if DEVICE == "cuda" else {}
    one = worker(made, engine_kwargs=SHARED_GPU | much)
    control = one.controller.control
    assert control is not None
    control.force(3)  # the number that pays depends on the clock
    before = tokens_of(finish(one.engine, requests))
    usual = acceptance(control)
    free = torch.cuda.mem_get_info()[0] if DEVICE == "cuda" else 0
    one.sleep()
    if DEVICE == "cuda":
        assert torch.cuda.mem_get_info()[0] - free > 0.05 * torch.cuda.mem_get_info()[1]
    send(one.engine, made[0], 1)
    assert tokens_of(finish(one.engine, requests)) == before
    assert acceptance(control) == pytest.approx(usual, rel=0.05) and usual > 1.0
