"""The GPU benchmarks' own code over real SGLang, in sizes that take seconds on a CPU: stages, resuming, tables."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_generation
from benchmarks.sglang_engines import DEVICE
from rlhfspec_mega.draft.directory import write_draft
from rlhfspec_mega.draft.shape import draft_shape, draft_tensors
from rlhfspec_mega.rollout.sglang_engine import profile
from rlhfspec_mega.simulate.curves import read_curves
from tests.e2e.conftest import SHAPE, make_model

ENGINES = 8 if DEVICE == "cuda" else 4


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A small random model, few samples."""
    model, draft = make_model(tmp_path / "model", SHAPE), tmp_path / "draft"
    shape = draft_shape(SHAPE)
    write_draft(draft, shape, {info.name: torch.randn(info.shape) for info in draft_tensors(shape)})
    monkeypatch.setattr(gpu_generation, "pair", lambda name: (model, draft))
    monkeypatch.setattr(gpu_generation, "shapes_of_8b", lambda directory: (model, draft, SHAPE))
    monkeypatch.setattr(profile, "SECONDS", 0.0)
    for name, value in {
        "BATCHES": (1, 2),
        "TOKENS": 6,
        "DECAY": 8,
        "SCALE": 0.1,
        "LENGTHS": (8, 16, 24),
        "SLOTS": 4,
        "POSITIONS": 80,
        "PROMPT": 20,
        "LONGEST": 20,
        "ROOM": 1000,
    }.items():
        monkeypatch.setattr(gpu_generation, name, value)


@pytest.fixture
def out() -> Iterator[Path]:
    """A short name: the sockets of SGLang's processes lie there, and theirs may have 107 letters."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


def stage(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_generation", *arguments])
    gpu_generation.main()


def test_speed_goes_on_where_it_was_cut_off(
    monkeypatch: pytest.MonkeyPatch, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same engines are there when it does."""
    start, started = gpu_generation.engines, dict[str, gpu_generation.Run]()

    def engines(*given: Path) -> dict[str, gpu_generation.Run]:
        started.update(started or start(*given))
        return started

    monkeypatch.setattr(gpu_generation, "engines", engines)
    given = ("speed", "--out", str(out), "--repeats", "2")
    with pytest.raises(SystemExit, match="the same command goes on"):
        stage(monkeypatch, *given, "--seconds", "0.0")
    begun = (out / "gpu_speed.jsonl").read_text()
    assert begun and not (out / "gpu_speed.json").exists()
    stage(monkeypatch, *given)
    rows = [json.loads(line) for line in (out / "gpu_speed.jsonl").read_text().splitlines()]
    assert (out / "gpu_speed.jsonl").read_text().startswith(begun) and len(started) == ENGINES
    assert len(rows) == len({(row["repeat"], row["scenario"], row["engine"]) for row in rows}) == 2 * 3 * ENGINES
    found = json.loads((out / "gpu_speed.json").read_text())
    assert found["times"] == rows and found["conditions"]["sglang"] != "not installed"
    printed = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(("stock", "ours")) for line in printed) == ENGINES
    last = json.loads(printed[-1])
    assert last.keys() == found["summary"].keys() and all(0 < value < 100 for value in last.values())


def test_the_curve_is_one_that_the_simulator_reads(monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
    stage(monkeypatch, "curve", "--out", str(out))
    found = json.loads((out / "gpu_curve.json").read_text())
    assert found["tables"].keys() == {"8", "16", "24"}
    (out / "curves.json").write_text(json.dumps(found["curves"]))
    curves = read_curves(out / "curves.json")
    assert curves.source["kind"] == "measured"
    assert curves.plain.batches[0] == 1 and all(seconds > 0 for seconds in curves.plain.seconds)


def test_updates_are_timed(monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
    stage(monkeypatch, "updates", "--out", str(out), "--repeats", "2")
    found = json.loads((out / "gpu_updates.json").read_text())
    assert len(found["seconds"]) == 2 and found["parameters"] == SHAPE.parameters
