"""A run's checkpoints as models: converted while others train on, and the start of another run."""

from __future__ import annotations

from pathlib import Path

import torch

from rlhfspec_mega.models.hf_directory import HfWeights
from tests.e2e.conftest import small_run, train
from tools import megatron_to_hf


def assert_same(one: Path, other: Path) -> None:
    a, b = HfWeights(one), HfWeights(other)
    assert set(a.names()) == set(b.names())
    assert all(torch.equal(a.get(name), b.get(name)) for name in a.names())


def test_checkpoints_are_the_exported_models(finished: Path, tmp_path: Path) -> None:
    for step, exported in ((2, "exports/step_2"), (4, "model")):
        words = [str(finished / "checkpoints" / f"step_{step}"), str(tmp_path / f"{step}")]
        megatron_to_hf.convert(megatron_to_hf.parser().parse_args(words))
        assert_same(tmp_path / f"{step}", finished / exported)
        assert (tmp_path / f"{step}" / "tokenizer.json").exists()


def test_a_run_starts_from_a_checkpoint(finished: Path, tmp_path: Path) -> None:
    start = finished / "checkpoints" / "step_4"
    options = [
        "actor.tensor_parallel=1",
        "actor.pipeline_parallel=2",
        "trainer.steps=1",
        "actor.optimizer.lr=1e-30",
        f"model.cache_dir={tmp_path}/cache",
    ]
    result = train(*small_run(start, tmp_path, "next", *options))
    assert result.returncode == 0, result.stderr
    assert "A Hugging Face copy of" in result.stdout
    assert_same(tmp_path / "next" / "model", finished / "model")  # the update was too small to change a weight
