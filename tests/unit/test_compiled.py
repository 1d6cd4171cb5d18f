"""Machine code that is kept is that of the current sources, also of those of other modules."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import rlhfspec_mega

COMPILED = Path(rlhfspec_mega.__file__).with_name("compiled.py")
CALLER = """
from rlhfspec_mega.compiled import compiled
from rlhfspec_mega.other import FACTOR, twice


@compiled
def answer(x):
    return FACTOR * twice(x)


result = answer(5)
hits = sum(answer.stats.cache_hits.values())
print(result, hits)
"""
OTHER = """
from rlhfspec_mega.compiled import compiled
from rlhfspec_mega.constants import FACTOR


@compiled
def twice(x):
    return {factor} * x
"""


def test_code_is_made_anew_when_a_module_that_it_imports_changes(tmp_path: Path) -> None:
    package = tmp_path / "rlhfspec_mega"
    package.mkdir()
    shutil.copy(COMPILED, package)
    (package / "__init__.py").touch()
    (package / "caller.py").write_text(CALLER)

    def run() -> str:
        command = [sys.executable, "-B", "-c", "import rlhfspec_mega.caller"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    (package / "constants.py").write_text("FACTOR = 1\n")
    (package / "other.py").write_text(OTHER.format(factor=2))
    assert run() == "10 0" and run() == "10 1"
    (package / "other.py").write_text(OTHER.format(factor=3))
    assert run() == "15 0", "a function of another module is part of the code"
    (package / "constants.py").write_text("FACTOR = 7\n")
    assert run() == "105 0" and run() == "105 1", "so is a constant, also at second hand"
