"""Samples on two engines in processes of their own: they move all the time, and one engine dies or freezes."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks.sglang_engines import DEVICE, SHARED_GPU, send
from rlhfspec_mega.cluster.interface import WorkerSpec
from rlhfspec_mega.cluster.local import LocalCluster
from rlhfspec_mega.cluster.supervised import Group
from rlhfspec_mega.config.schema.generation import RolloutConfig, SGLangConfig, SpeculationConfig
from rlhfspec_mega.models.hf_config import read_shape
from rlhfspec_mega.planning.lengths import LengthPredictor
from rlhfspec_mega.rollout import reallocation
from rlhfspec_mega.rollout.manager import RolloutManager
from rlhfspec_mega.rollout.reallocation import Reallocation
from rlhfspec_mega.rollout.sglang_engine import engine, profile
from rlhfspec_mega.types import EngineReport
from rlhfspec_mega.workers.sglang_engine import SGLangEngineWorker
from tests.clusters import local_cluster, worker_process
from tests.e2e.test_migration import MortalEngine
from tests.engine_pool import opened
from tests.near_tie import assert_same
from tests.sglang.conftest import requests_of, torch_results
from tests.unit.test_migration import RandomMoves

# By what happens to an engine.
SAMPLES: dict[str | None, int] = {None: 200, "sent, not acknowledged": 500, "frozen": 200}


class MortalWorker(SGLangEngineWorker):
    """A worker that can be told when to die, or to freeze what decodes for it."""

    die_when = MortalEngine.die_when
    _calls_left = 0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        profile.SECONDS = 0.0
        super().__init__(*arguments, **named)

    def take_weights(self, model: Path) -> None:
        send(self.engine, model, 0)

    def freeze_at_call(self, calls: int, seconds: float) -> None:
        """Stop SGLang's scheduler as SIGSTOP does, after so many calls of `advance`; then it may be silent so long."""
        engine.SILENCE_SECONDS = engine.IDLE_SECONDS = seconds
        self._calls_left = calls

    def advance(self, *arguments: Any, **named: Any) -> EngineReport:
        self._calls_left -= 1
        if self._calls_left == 0:
            self._freeze()
        return super().advance(*arguments, **named)

    def _freeze(self) -> None:
        for process in psutil.Process().children(recursive=True):
            if "sglang::scheduler" in " ".join(process.cmdline()):
                os.kill(process.pid, signal.SIGSTOP)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    cluster = local_cluster(tmp_path, use_gpus=DEVICE == "cuda", start_timeout=240.0)
    yield cluster
    cluster.close()


@pytest.mark.parametrize("trouble", list(SAMPLES))
def test_no_sample_is_lost(
    trouble: str | None,
    made: tuple[Path, Path],
    judge: Callable[[list[int]], torch.Tensor],
    cluster: LocalCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None is lost, none comes twice (the ledger sees to it), and all tokens are the torch engine's."""
    monkeypatch.setattr(reallocation, "PLAN_SHARE", 1.0)  # many moves
    config = RolloutConfig(
        engine="sglang",
        max_running_requests=8,
        max_prompt_tokens=150,
        max_new_tokens=150,
        sglang=SGLangConfig(engine_kwargs=SHARED_GPU),
    )
    memory = 0.1 if DEVICE == "cuda" else None
    arguments = {
        "shape": read_shape(made[0]),
        "config": config,
        "dtype": "float32",
        "model": made[0],
        "memory": memory,
        "sleeps": False,
        "device": DEVICE,
        "draft": made[1],
        "drafting": SpeculationConfig(),
    }
    spec = WorkerSpec("tests.sglang.test_migration.MortalWorker", arguments, (0,))
    engines = cluster.launch("engine", [spec, spec], replaceable=True)
    cluster.wait_started()
    engines.call("take_weights", made[0], phase="load")
    cluster.publish(0)
    for rank in range(2):
        engines.confirm(rank, 0)
    lengths = random.Random(0)
    requests = [
        replace(one, max_new_tokens=lengths.choice((1, 10, 60, 120)))
        for one in requests_of(made[0], SAMPLES[trouble] // 4)
    ]
    assert len(requests) == SAMPLES[trouble]
    wanted = torch_results(made[0], requests)
    sign = tmp_path / "died"
    if trouble == "frozen":
        cluster.wait([engines.start(0, "freeze_at_call", 40, 5.0)], "arm")
    elif trouble:
        engines.call("die_when", trouble, sign, phase="arm")
    policy = RandomMoves(1, 0.4)
    manager = RolloutManager(
        engines,
        cluster.wait,
        revive=lambda: None,
        poll_seconds=0.02,
        reallocation=Reallocation(policy, LengthPredictor(limit=150), plan_seconds=0.0),
    )
    await_serving(cluster, engines)
    results = manager.generate(requests, opened(requests), "generate")
    assert sign.exists() == (trouble == "sent, not acknowledged")
    assert_same(wanted, results, requests, judge)
    tail = manager.take_tail()
    print(f"{trouble}: {tail.migrations} moves")
    if trouble is None:  # else the one engine may be gone at the first move
        assert tail.migrations > 20, f"of {policy.moves} that were ordered; {engines.serving()} serve"
        dies_with_its_scheduler(cluster, engines)


def await_serving(cluster: LocalCluster, engines: Group) -> None:
    """Samples move between the engines that serve when a rollout begins; a starved machine may silence one for long."""
    end = time.monotonic() + 60.0
    while engines.serving() != [0, 1]:
        assert time.monotonic() < end, f"of two engines, {engines.serving()} serve"
        cluster.look("begin")
        time.sleep(0.1)


def dies_with_its_scheduler(cluster: LocalCluster, engines: Group) -> None:
    """An engine that is asked for nothing is given up, too, when the processes that decode have ended."""
    assert [engines.launches(rank) for rank in range(2)] == [1, 1]
    # Other tests' engines may live in this process: the death of their schedulers would end it.
    worker = worker_process("engine-0")
    assert worker is not None
    processes = worker.children(recursive=True)
    schedulers = [process for process in processes if "sglang::scheduler" in " ".join(process.cmdline())]
    schedulers[0].kill()
    end = time.monotonic() + 30.0
    while engines.launches(0) + engines.launches(1) == 2:
        assert time.monotonic() < end, "the engine has not ended"
        cluster.look("idle")
        time.sleep(0.1)
