"""Runs that are stopped, moved to other parallel sizes, killed while saving or out of disk, and resumed."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.config.output_dir import claimed_output_dir
from tests.e2e.conftest import marked, small_run, start, train

LAYOUTS = {  # until which step; the run that it is compared with has TP 2
    2: ["actor.tensor_parallel=1", "actor.pipeline_parallel=2"],
    4: ["actor.tensor_parallel=1", "actor.data_parallel=2"],
}


def steps_of(directory: Path) -> list[dict]:
    """Metrics of the training steps, in the order of the file."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "actor/loss" in row]


def check_same_run(directory: Path, finished: Path) -> None:
    """Every step once, with the numbers of the undisturbed run; the near-tie rule allows for the last bits."""
    got, want = steps_of(directory), steps_of(finished)
    assert [row["step"] for row in got] == [row["step"] for row in want]
    for row, wanted in zip(got, want, strict=True):
        for name in (
            "rollout/reward_mean",
            "actor/loss",
            "actor/grad_norm",
            "actor/kl",
            "actor/old_entropy",
            "rollout/response_length_mean",
        ):
            assert row[name] == pytest.approx(wanted[name], abs=1e-4, rel=1e-4), (row["step"], name)


def names(directory: Path) -> set[str]:
    return {path.name for path in (directory / "checkpoints").iterdir()}


def test_one_run_under_two_layouts(finished: Path, model: Path, tmp_path: Path) -> None:
    options = small_run(model, tmp_path, "moved", "trainer.export=false")
    for steps, layout in LAYOUTS.items():
        result = train(*options, *layout, f"trainer.steps={steps}", f"trainer.resume={str(steps > 2).lower()}")
        assert result.returncode == 0, result.stderr
        if steps > 2:
            assert "random generators start afresh" in result.stdout + result.stderr
    check_same_run(tmp_path / "moved", finished)


def test_a_run_killed_while_it_saves(finished: Path, model: Path, tmp_path: Path) -> None:
    """Killed during its second save, it goes on from the first and leaves nothing of the second."""
    options = small_run(model, tmp_path, "killed", "trainer.checkpoint_every=1", "trainer.export=false")
    process = start(*options, mark=f"{tmp_path}")
    partial = tmp_path / "killed" / "checkpoints" / "step_2.partial"
    while not partial.exists():
        assert process.poll() is None
        time.sleep(0.001)
    process.kill()
    process.communicate()
    while marked(f"{tmp_path}"):
        time.sleep(0.1)
    assert names(tmp_path / "killed") == {"latest", "step_1", "step_2.partial"}
    resumed = train(*options, "trainer.resume=true")
    assert resumed.returncode == 0, resumed.stderr
    assert names(tmp_path / "killed") == {"latest", "step_3", "step_4"}
    check_same_run(tmp_path / "killed", finished)


@pytest.fixture
def small_disk(finished: Path, tmp_path: Path) -> Iterator[Path]:
    """A tmpfs with room for one checkpoint and a half."""
    size = sum(path.stat().st_size for path in (finished / "checkpoints" / "step_2").rglob("*") if path.is_file())
    place = tmp_path / "disk"
    place.mkdir()
    options = f"size={size * 3 // 2 + 2**18}"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", place], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk(finished: Path, model: Path, small_disk: Path) -> None:
    """There is room for the first checkpoint only: the run goes on without others, but fails when the last one fails.

    Given room, it resumes from the first.
    """
    options = small_run(model, small_disk, "full", "trainer.checkpoint_every=1", "trainer.export=false")
    result = train(*options)
    assert result.returncode == 1
    (sentence,) = result.stderr.strip().splitlines()
    assert "step_4 was not saved" in sentence and "MiB are free" in sentence
    notes = [line for line in result.stdout.splitlines() if "was not saved" in line]
    assert ["step_2" in notes[0], "step_3" in notes[1]] == [True, True] and len(notes) == 2
    assert len(steps_of(small_disk / "full")) == 4 and names(small_disk / "full") == {"latest", "step_1"}
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    resumed = train(*options, "trainer.resume=true")
    assert resumed.returncode == 0, resumed.stderr
    assert names(small_disk / "full") == {"latest", "step_3", "step_4"}
    check_same_run(small_disk / "full", finished)


def test_a_run_that_died_before_its_first_checkpoint_begins_again(model: Path, tmp_path: Path) -> None:
    options = small_run(model, tmp_path, "early", "trainer.steps=1", "trainer.export=false")
    with claimed_output_dir(load_config(options)) as directory:
        (directory / "logs").mkdir()
    result = train(*options, "trainer.resume=true")
    assert result.returncode == 0, result.stderr
    assert "holds no checkpoint yet" in result.stdout + result.stderr
    assert [row["step"] for row in steps_of(tmp_path / "early")] == [0]
