"""The map of the package: imports point downward, heavy libraries stay in their corner, files stay short."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "rlhfspec_mega"

# The longest prefix that matches decides. A module may import its own layer and those below.
LAYERS = {
    "types": 0,
    "ledger": 1,
    "errors": 0,
    "compiled": 0,
    "exponential": 0,
    "config": 3,  # checks and sizes read shapes and plans
    "config.schema": 0,
    "config.import_path": 0,
    "config.option": 0,
    "models.shape": 0,
    "models.model_directory": 0,
    "draft.shape": 0,
    "rl": 1,
    "planning": 1,
    "sampling": 1,
    "data": 2,
    "reward": 2,
    "observe": 2,
    "models": 2,
    "draft": 2,
    "megatron": 2,
    "rollout": 2,
    "history": 1,
    "simulate": 3,
    "resharding": 3,
    "cluster": 3,
    "workers": 4,
    "system": 5,
    "generation": 5,
    "algorithms": 5,
    "checkpoints": 5,
    "conversion": 3,
    "bootstrap": 5,
    "run": 5,
    "startup": 5,
    "stop": 0,
    "trainer": 5,
    "supervised": 5,
    "evaluation": 5,
}
# These see only themselves and layer 0 or what is named.
SECLUDED = {
    "rl": (),
    "planning": (),
    "sampling": (),
    "observe": (),
    "data": (),
    "reward": (),
    "models": (),
}
NEVER = {("megatron", "rollout"), ("rollout", "megatron")}
LIBRARIES = {
    "megatron": ("megatron",),
    "sglang": ("rollout.sglang_engine",),
    "ray": ("cluster.ray",),
    "hydra": ("config.compose",),
}
PURE = {"planning": ("torch", "transformers", "megatron", "sglang", "ray"), "config": ("torch",)}


def imports_of(source: str) -> Iterator[tuple[str, bool]]:
    """Every imported module ("a.b.c", and "a.b.c.name" for from-imports), and whether it is at the top level.

    Imports only for the type checker count: they are knowledge of the other module too.
    """
    tree = ast.parse(source)
    inside = {
        id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(f)
    }
    for node in ast.walk(tree):
        top = id(node) not in inside
        if isinstance(node, ast.Import):
            yield from ((alias.name, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what is imported"
            yield from ((f"{node.module}.{alias.name}", top) for alias in node.names)


def within(module: str, place: str) -> bool:
    return module == place or module.startswith((f"{place}.", f"{place}_"))


def layer(module: str) -> int:
    """The layer of a module named without the package, e.g. "megatron.step"."""
    fitting = [place for place in LAYERS if within(module, place)]
    assert fitting, f"{module} has no layer: add it to the map in this test and in docs/architecture.md"
    return LAYERS[max(fitting, key=len)]


def violations(module: str, source: str) -> list[str]:
    """What the imports of a module (named without the package) break, in words."""
    found = []
    area = module.split(".")[0]
    for target, top in imports_of(source):
        library, _, rest = target.partition(".")
        if library == PACKAGE and rest:
            other = rest.split(".")[0]
            if layer(rest) > layer(module):
                found.append(f"{module} imports upward: {rest}")
            if (area, other) in NEVER:
                found.append(f"{module} must not know {rest}")
            if area in SECLUDED and layer(rest) > 0 and other not in (area, *SECLUDED[area]):
                found.append(f"{module} may import only itself and layer 0, not {rest}")
        if library in LIBRARIES and not any(within(module, place) for place in LIBRARIES[library]):
            found.append(f"{module} must not import {library}")
        if top and library in PURE.get(area, ()):
            found.append(f"{module} must not import {library}: it would slow or bind what is pure")
    return found


def package_files() -> list[Path]:
    return sorted((ROOT / PACKAGE).rglob("*.py"))


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT / PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("file", package_files(), ids=module_name)
def test_module_obeys_the_map(file: Path) -> None:
    source = file.read_text(encoding="utf-8")
    if module_name(file):
        assert violations(module_name(file), source) == []


@pytest.mark.parametrize(
    ("module", "line", "words"),
    [
        ("megatron.step", "from rlhfspec_mega.rollout import manager", "must not know rollout.manager"),
        ("rollout.manager", "import rlhfspec_mega.megatron.step", "must not know megatron.step"),
        ("rollout.manager", "from rlhfspec_mega.trainer import run", "imports upward: trainer"),
        ("observe.console", "from rlhfspec_mega.cluster.local import Cluster", "imports upward: cluster"),
        ("observe.console", "from rlhfspec_mega.models.transformer import X", "may import only itself"),
        ("planning.memory", "from rlhfspec_mega.rl.loss import x", "may import only itself"),
        ("planning.memory", "import torch", "must not import torch"),
        ("config.checks", "from torch import cuda", "must not import torch"),
        ("resharding.buckets", "from megatron.core import parallel_state", "must not import megatron"),
        ("rollout.torch_engine.engine", "import sglang.srt", "must not import sglang"),
        ("cluster.local", "def f():\n    import ray", "must not import ray"),
        ("trainer", "import hydra", "must not import hydra"),
    ],
)
def test_a_forbidden_import_is_found(module: str, line: str, words: str) -> None:
    assert any(words in violation for violation in violations(module, line)), violations(module, line)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("megatron.groups", "from megatron.core import parallel_state"),
        ("cluster.ray_launcher", "import ray"),
        ("planning.memory", "from rlhfspec_mega.models.shape import ModelShape"),
        ("config.hardware", "def f():\n    import torch"),
        ("trainer", "from rlhfspec_mega.cluster.local import LocalCluster"),
    ],
)
def test_a_permitted_import_is_let_through(module: str, line: str) -> None:
    assert violations(module, line) == []


def test_a_training_rank_starts_without_torchs_compiler() -> None:
    """On a CPU, where nothing is compiled: see megatron.quick_start, which only helps if it is imported first."""
    line = (
        "import sys, torch, rlhfspec_mega.workers.megatron, rlhfspec_mega.workers.torch_engine; "
        "rlhfspec_mega.megatron.process.set_deterministic(True); assert torch.are_deterministic_algorithms_enabled(); "
        "sys.exit('torch._inductor.compile_fx' in sys.modules)"
    )
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    assert subprocess.run([sys.executable, "-c", line], cwd=ROOT, env=environment, check=False).returncode == 0


def test_the_command_imports_nothing_heavy_at_the_top() -> None:
    top = {name for name, at_top in imports_of((ROOT / "train.py").read_text()) if at_top}
    heavy = {"torch", "hydra", "megatron", "transformers", f"{PACKAGE}.trainer"}
    assert not [name for name in top if any(within(name, library) for library in heavy)]


@pytest.mark.parametrize("file", package_files(), ids=module_name)
def test_file_and_functions_are_short(file: Path) -> None:
    source = file.read_text(encoding="utf-8")
    assert len(source.splitlines()) < 400
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length < 60, f"{node.name} has {length} lines"
