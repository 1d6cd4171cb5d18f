"""Machine code that is kept is that of the current sources, also of those of other modules."""

from __future__ import annotations

import os
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


def make_package(directory: Path) -> Path:
    package = directory / "rlhfspec_mega"
    package.mkdir()
    shutil.copy(COMPILED, package)
    (package / "__init__.py").touch()
    return package


def printed(directory: Path, module: str, seed: int = 0) -> str:
    """By a new process that imports a module; `seed` is that of the order of its sets."""
    command = [sys.executable, "-B", "-c", f"import rlhfspec_mega.{module}"]
    given = os.environ | {"PYTHONHASHSEED": str(seed)}
    done = subprocess.run(command, cwd=directory, env=given, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_code_is_made_anew_when_a_module_that_it_imports_changes(tmp_path: Path) -> None:
    package = make_package(tmp_path)
    (package / "caller.py").write_text(CALLER)

    def run() -> str:
        return printed(tmp_path, "caller")

    (package / "constants.py").write_text("FACTOR = 1\n")
    (package / "other.py").write_text(OTHER.format(factor=2))
    assert run() == "10 0" and run() == "10 1"
    (package / "other.py").write_text(OTHER.format(factor=3))
    assert run() == "15 0", "a function of another module is part of the code"
    (package / "constants.py").write_text("FACTOR = 7\n")
    assert run() == "105 0" and run() == "105 1", "so is a constant, also at second hand"


SUM = """
import numpy as np

from rlhfspec_mega.compiled import vectorized


@vectorized
def total(values):
    found = 0.0
    for value in values:
        found += value
    return found


result = total(np.ones(5))
print(result, sum(total.stats.cache_hits.values()))
"""


def test_code_is_kept_for_every_later_process(tmp_path: Path) -> None:
    """Sets of names, such as compiler options, have another order in each."""
    (make_package(tmp_path) / "sums.py").write_text(SUM)
    assert [printed(tmp_path, "sums", seed) for seed in range(6)] == ["5.0 0", *["5.0 1"] * 5]
