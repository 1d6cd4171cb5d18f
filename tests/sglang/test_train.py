"""Whole runs through the command line with SGLang's engines."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
import torch

from benchmarks.sglang_engines import DEVICE, SHARED_GPU
from rlhfspec_mega.sampling.noise import sample_seed
from rlhfspec_mega.types import GenerationRequest
from tests.e2e.conftest import marked, small_run, start
from tests.near_tie import MAX_GAP, perturbed_scores
from tests.sglang.compare import compare, samples_of

SECONDS = 400.0
STEPS = 3


def options(made: tuple[Path, Path], output: Path, name: str, *more: str) -> list[str]:
    """A small run with a trained model and its draft, which is refreshed after every step."""
    place = ("cluster=1n1g", "actor.tensor_parallel=1") if DEVICE == "cuda" else ()
    portable = [f"+rollout.sglang.engine_kwargs.{key}={value}" for key, value in SHARED_GPU.items()]
    return small_run(
        made[0],
        output,
        name,
        *place,
        f"speculation.draft_model_path={made[1]}",
        "speculation.refresh_every=1",
        "trainer.prompts_per_step=6",
        f"trainer.steps={STEPS}",
        "trainer.checkpoint_every=1",
        "rollout.max_new_tokens=80",
        "rollout.max_prompt_tokens=120",
        "trainer.max_tokens_per_microbatch=400",
        "data.max_terms=12",
        *(portable if "rollout=sglang" in more else ()),
        *more,
    )


def finished(*given: str) -> str:
    """What the run says; nothing of it may be left a moment after."""
    mark = uuid4().hex
    process = start(*given, mark=mark)
    try:
        output, errors = process.communicate(timeout=SECONDS)
    finally:
        process.kill()  # its workers end with it
    assert process.returncode == 0, output[-3000:] + errors[-3000:]
    assert_nothing_left(mark, set())
    return output


def assert_nothing_left(mark: str, others: set[psutil.Process]) -> None:
    """No process of the run a moment later. SGLang's carry no mark: they write their title over their environment."""
    end = time.monotonic() + 10.0
    while time.monotonic() < end and (marked(mark) or any(map(runs, others))):
        time.sleep(0.1)
    assert marked(mark) == [] and [other for other in others if runs(other)] == []


def runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_resumes_where_a_scheduler_was_killed_in_between(made: tuple[Path, Path], tmp_path: Path) -> None:
    """All phases; SGLang's scheduler dies with -9, its engine is replaced; no sample is lost; the run goes on later."""
    mark = uuid4().hex
    process = start(*options(made, tmp_path, "run", "rollout=sglang"), mark=mark)
    run = tmp_path / "run"
    end = time.monotonic() + SECONDS
    while not (run / "metrics.jsonl").exists() or len(metrics(run)) < 2:
        assert process.poll() is None, "".join(process.communicate())[-6000:]
        assert time.monotonic() < end
        time.sleep(0.05)
    others = set(psutil.Process(process.pid).children(recursive=True))
    schedulers = [other for other in others if "sglang::scheduler" in " ".join(other.cmdline())]
    assert schedulers
    os.kill(schedulers[0].pid, signal.SIGKILL)
    output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output[-3000:] + errors[-3000:]
    assert_nothing_left(mark, others)
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert len(samples_of(run)) == STEPS * 12
    assert all(row["rollout/logprob_diff_max"] < 1e-3 for row in rows if "rollout/logprob_diff_max" in row)
    assert any(row.get("draft/refresh_kept") is not None for row in rows)
    more = options(made, tmp_path, "run", "rollout=sglang", f"trainer.steps={STEPS + 1}", "trainer.resume=true")
    finished(*[option for option in more if option != f"trainer.steps={STEPS}"])
    assert [row["step"] for row in metrics(run)] == list(range(STEPS + 2))


def test_the_torch_engine_gives_the_same_run(
    made: tuple[Path, Path], judge: Callable[[list[int]], torch.Tensor], tmp_path: Path
) -> None:
    """trainer.deterministic with drafting in both: the same samples but for a near tie, and equal rewards.

    The start model judges a near tie of the first step; after one the runs learn from other samples.
    """
    for engine in ("torch", "sglang"):
        finished(*options(made, tmp_path, engine, f"rollout={engine}", "trainer.deterministic=true"))
    found = compare(tmp_path / "torch", tmp_path / "sglang")
    assert found.samples == STEPS * 12 and found.tokens > 250
    assert found.rewards_differ == [] and found.logprob_difference < 1e-4
    assert all(name.startswith("0.") for name in found.parted) and len(found.parted) <= 1
    for name, at in found.parted.items():
        sample = samples_of(tmp_path / "torch")[name]
        before = [*sample["prompt_tokens"], *sample["response_tokens"][:at]]
        request = GenerationRequest(
            name, name, tuple(before), sample_seed(0, 0, sample["prompt_index"], sample["member"]), 1, 1.0
        )
        best = perturbed_scores(judge(before), request, len(before) - 1).topk(2).values
        assert best[0] - best[1] < MAX_GAP
    drafted = [
        row["speculation/tokens_per_step"]
        for row in metrics(tmp_path / "sglang")
        if "speculation/tokens_per_step" in row
    ]
    assert len(drafted) == STEPS and min(drafted) > 1.2, "hardly anything was drafted"


@pytest.mark.skipif(DEVICE == "cuda", reason="one GPU has room for one engine's run")
def test_under_ray(made: tuple[Path, Path], tmp_path: Path) -> None:
    finished(*options(made, tmp_path, "ray", "rollout=sglang", "launcher=ray"))
    assert len(samples_of(tmp_path / "ray")) == STEPS * 12
