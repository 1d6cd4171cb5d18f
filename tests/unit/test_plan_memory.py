"""tools.plan_memory: the memory of a training rank for one model and layout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.config.dry_run import plan_of

REPOSITORY = Path(__file__).resolve().parents[2]


def tool(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.plan_memory", *words]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


def test_it_says_what_a_dry_run_says() -> None:
    words = ["--model", "70b", "--tensor-parallel", "8", "--pipeline-parallel", "4", "--data-parallel", "2", "--json"]
    stages = json.loads(tool(*words).stdout)
    planned = plan_of(load_config(["model=70b", "cluster=8n8g"]))
    for stage, rank in enumerate(planned["actor"]):
        assert {name: stages[stage][name] for name in rank} == rank
        assert stages[stage]["total"] == sum(rank.values())
    assert [one["parameters"] for one in stages] == planned["parameters"]["actor"][::16]


def test_the_table_has_a_line_for_each_stage() -> None:
    lines = tool("--model", "8b", "--pipeline-parallel", "2").stdout.splitlines()
    assert len(lines) == 4 and lines[2].startswith("0 ") and lines[3].startswith("1 ")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--model", "nowhere"], "does not exist"),
        (["--model", "8b", "--tensor-parallel", "3"], "does not divide the 32 heads"),
        (["--model", "8b", "--pipeline-parallel", "5"], "does not divide the"),
        (["--model", "8b", "--data-parallel", "0"], "not a whole number from 1 on"),
    ],
)
def test_bad_input_is_refused(words: list[str], sentence: str) -> None:
    found = tool(*words)
    assert found.returncode == 2 and sentence in found.stderr and "Traceback" not in found.stderr
