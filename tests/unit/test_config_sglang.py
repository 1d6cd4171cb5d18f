"""rollout=sglang: refused in one sentence where it cannot run, its options checked where it can."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlhfspec_mega.config import checks, hardware, machine, sglang
from rlhfspec_mega.planning.memory import GIB
from rlhfspec_mega.rollout.sglang_engine import pins
from tests.unit.test_config import load, refusal

ROOT = Path(__file__).resolve().parents[2]
GPUS = "rollout=sglang", "cluster=1n8g", "cluster.device=cuda"


@pytest.fixture
def out(tmp_path: Path) -> str:
    return f"output_dir={tmp_path}/outputs"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with eight GPUs of 80 GiB and SGLang."""
    for module in (hardware, machine):
        monkeypatch.setattr(module, "gpu_memory", lambda: (80 * GIB,) * 8)
    monkeypatch.setattr(pins, "missing", lambda device: None)


def test_without_sglang_one_sentence_says_what_is_missing_and_what_to_do(tmp_path: Path) -> None:
    """From the command line; quick, as neither torch nor SGLang is imported for it."""
    command = [sys.executable, "-X", "importtime", str(ROOT / "train.py"), "rollout=sglang"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert found.returncode == 2
    (sentence,) = (line for line in found.stderr.splitlines() if not line.startswith("import time:"))
    assert not re.search(r"\| +(torch|sglang)$", found.stderr, re.MULTILINE)
    for words in (
        "sglang is not installed",
        "run make sglang-cpu",
        ".venv-sglang/bin/python",
        "python train.py rollout=torch",
    ):
        assert words in sentence
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("speculation=uniform", "use speculation=adaptive, speculation=fixed or speculation=off"),
        ("rollout.sglang.tensor_parallel=3", "use a divisor"),
        ("rollout.sglang.mem_fraction_static=1.5", "is out of range: it must be above 0 and below 1"),
        ("speculation.topk=2", "speculation.topk=2 has no effect here: add rollout.sglang.trees=true"),
        (
            "speculation=fixed speculation.num_draft_tokens=4",
            "speculation.num_draft_tokens=4 has no effect here: add rollout.sglang.trees=true",
        ),
        ("speculation.tail_weight=1.0", "speculation.tail_weight=1.0 has no effect here: add rollout=torch"),
        (
            "rollout.sglang.trees=true speculation=off",
            "rollout.sglang.trees=true has no effect here: add speculation=adaptive",
        ),
        ("placement=separate rollout.sglang.enable_memory_saver=false", "no effect here: add placement=colocated"),
        ("rollout.engines=8 rollout.sglang.tensor_parallel=2", "use at most 4"),
    ],
)
def test_what_sglang_cannot_do(overrides: str, words: str, out: str, gpus: None) -> None:
    assert words in refusal(*GPUS, *overrides.split(), out)


@pytest.mark.parametrize(
    "option",
    [
        "tensor_parallel=2",
        "mem_fraction_static=0.4",
        "enable_memory_saver=false",
        "trees=true",
        "engine_kwargs.page_size=1",
    ],
)
def test_options_of_sglang_count_with_it_only(option: str, out: str) -> None:
    plus = "+" if option.startswith("engine_kwargs") else ""
    assert "has no effect here: add rollout=sglang" in refusal(f"{plus}rollout.sglang.{option}", out)


def test_a_share_of_gpu_memory_is_refused_on_a_cpu(out: str, gpus: None) -> None:
    assert "add cluster=1n1g" in refusal("rollout=sglang", "rollout.sglang.mem_fraction_static=0.4", out)


def test_kernels_for_cuda_do_not_run_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"sglang": pins.VERSION, pins.CUDA_KERNELS: "0.4.5"}
    monkeypatch.setattr(pins, "_installed", versions.get)
    assert pins.missing("cuda") is None
    assert "make sglang-cpu" in (pins.missing("cpu") or "")


def test_engines_of_several_gpus(out: str, gpus: None) -> None:
    given = (*GPUS, "rollout.sglang.tensor_parallel=2", out)
    sizes = checks.check_config(load(*given))
    assert (sizes.engines, sizes.devices) == (4, 8)
    apart = load(*given, "placement=separate", "actor.data_parallel=1")
    sizes = checks.check_config(apart)
    assert sizes.engines == 3 and not sglang.engines_sleep(apart, sizes.placement)


def test_trees_read_what_chains_do_not(out: str, gpus: None) -> None:
    checks.check_config(
        load(*GPUS, "rollout.sglang.trees=true", "speculation.topk=2", "speculation.max_num_draft_tokens=12", out)
    )
    fixed = "speculation=fixed", "speculation.num_draft_tokens=12", "speculation.topk=3"
    checks.check_config(load(*GPUS, "rollout.sglang.trees=true", *fixed, out))


def test_without_sglang_the_package_is_named(out: str, gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        pins, "missing", lambda device: "sglang 0.5.22 is installed and the hooks are for 0.5.17: pip ..."
    )
    assert "sglang 0.5.22 is installed" in refusal(*GPUS, out)
