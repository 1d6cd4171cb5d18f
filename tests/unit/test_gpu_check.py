"""What tools/gpu_check.sh makes of its stages; tests/sglang/test_gpu_benchmarks.py runs those that use SGLang."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_report
from benchmarks.sglang_engines import conditions

ROOT = Path(__file__).resolve().parents[2]


SKIPPED = "\n\ndef test_two():\n    import pytest\n    pytest.skip('one GPU')\n"


@pytest.mark.parametrize("failing", [False, True])
def test_a_report_is_written_when_nothing_has_failed(
    failing: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What was skipped, for want of a second GPU, is told."""
    tests = tmp_path / "test_one.py"
    tests.write_text(f"def test_one():\n    print('hello')\n    assert {not failing}\n" + SKIPPED)
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
    assert found["tests"]["test_two"]["outcome"] == "skipped" and "one GPU" in found["tests"]["test_two"]["printed"]


def test_the_script_skips_what_is_done_and_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "gpu_speed.json").write_text("{}")
    environment = {"GPU_OUT": str(tmp_path), "PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}
    command = [str(ROOT / "tools" / "gpu_check.sh"), "speed", "nonsense"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert found.returncode == 2
    assert "speed is done" in found.stdout and "there is no stage 'nonsense'" in found.stderr
