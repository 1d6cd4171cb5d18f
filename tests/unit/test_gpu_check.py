"""The GPU checks' own code, run on a CPU over the stand-in for SGLang: stages, resuming, tables, reports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_generation, gpu_report
from benchmarks.sglang_engines import conditions
from rlhfspec_mega.models.draft_directory import draft_tensors, write_draft
from rlhfspec_mega.models.draft_shape import draft_shape
from rlhfspec_mega.simulate.curves import read_curves
from tests.e2e.conftest import SHAPE, make_model
from tests.sglang_fake import install

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stage takes a second: a small model, few samples."""
    install(monkeypatch)
    model, draft = make_model(tmp_path / "model"), tmp_path / "draft"
    shape = draft_shape(SHAPE)
    write_draft(draft, shape, {info.name: torch.randn(info.shape) for info in draft_tensors(shape)})
    monkeypatch.setattr(gpu_generation, "pair", lambda name: (model, draft))
    monkeypatch.setattr(gpu_generation, "shapes_of_8b", lambda directory: (model, draft, SHAPE))
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
    }.items():
        monkeypatch.setattr(gpu_generation, name, value)


def stage(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_generation", *arguments])
    gpu_generation.main()


def test_speed_goes_on_where_it_was_cut_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    given = ("speed", "--out", str(out), "--repeats", "2")
    with pytest.raises(SystemExit, match="the same command goes on"):
        stage(monkeypatch, *given, "--seconds", "1.0")
    begun = (out / "gpu_speed.jsonl").read_text()
    assert not (out / "gpu_speed.json").exists()
    stage(monkeypatch, *given)
    rows = [json.loads(line) for line in (out / "gpu_speed.jsonl").read_text().splitlines()]
    assert (out / "gpu_speed.jsonl").read_text().startswith(begun)
    assert len(rows) == len({(row["repeat"], row["scenario"], row["engine"]) for row in rows}) == 2 * 3 * 8
    found = json.loads((out / "gpu_speed.json").read_text())
    assert found["times"] == rows and found["conditions"]["sglang"] == "not installed"
    printed = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(("stock", "ours")) for line in printed) == 8
    last = json.loads(printed[-1])
    assert last.keys() == found["summary"].keys() and all(0 < value < 100 for value in last.values())


def test_the_curve_is_one_that_the_simulator_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stage(monkeypatch, "curve", "--out", str(tmp_path))
    found = json.loads((tmp_path / "gpu_curve.json").read_text())
    assert found["tables"].keys() == {"8", "16", "24"}
    (tmp_path / "curves.json").write_text(json.dumps(found["curves"]))
    curves = read_curves(tmp_path / "curves.json")
    assert curves.source["kind"] == "measured"
    assert curves.plain.batches[0] == 1 and all(seconds > 0 for seconds in curves.plain.seconds)


def test_updates_are_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stage(monkeypatch, "updates", "--out", str(tmp_path), "--repeats", "2")
    found = json.loads((tmp_path / "gpu_updates.json").read_text())
    assert len(found["seconds"]) == 2 and found["parameters"] == SHAPE.parameters


@pytest.mark.parametrize("failing", [False, True])
def test_a_report_is_written_when_all_has_passed(
    failing: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tests = tmp_path / "test_one.py"
    tests.write_text(f"def test_one():\n    print('hello')\n    assert {not failing}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests), "--junitxml"]
    subprocess.run([*command, str(tmp_path / "found.xml")], cwd=tmp_path, capture_output=True, timeout=60)
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path / "found.xml"), str(tmp_path / "out.json")])
    if failing:
        with pytest.raises(SystemExit, match="not every test passed"):
            gpu_report.main()
        assert not (tmp_path / "out.json").exists()
        return
    gpu_report.main()
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["tests"]["test_one"]["outcome"] == "passed" and found["conditions"] == conditions()


def test_the_script_skips_what_is_done_and_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "gpu_speed.json").write_text("{}")
    environment = {"GPU_OUT": str(tmp_path), "PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}
    command = [str(ROOT / "tools" / "gpu_check.sh"), "speed", "nonsense"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert found.returncode == 2
    assert "speed is done" in found.stdout and "there is no stage 'nonsense'" in found.stderr
