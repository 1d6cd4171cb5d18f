"""Samples move between engine processes; an engine is killed in the middle."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rlhfspec_mega.cluster.interface import WorkerSpec
from rlhfspec_mega.cluster.local import LocalCluster
from rlhfspec_mega.models.initialize import initial_tensors
from rlhfspec_mega.planning.lengths import LengthPredictor
from rlhfspec_mega.rollout.manager import RolloutManager
from rlhfspec_mega.rollout.reallocation import Reallocation
from rlhfspec_mega.workers.engine import TorchEngineWorker
from tests.clusters import local_cluster
from tests.engine_pool import CONFIG, SHAPE, TENSORS, Pool, generate, make_engine, opened, request
from tests.unit.test_migration import RandomMoves


class SeededEngine(TorchEngineWorker):
    """An engine with the weights of tests.engine_pool.make_engine, that tells its process."""

    def take_weights(self) -> int:
        self.begin_update(0, TENSORS)
        self.update_weights([(name, 0, tensor.flatten()) for name, tensor in initial_tensors(TENSORS, 1, seed=1)])
        self.end_update(0)
        return os.getpid()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    cluster = local_cluster(tmp_path)
    yield cluster
    cluster.close()


@pytest.mark.parametrize("kills", [0, 1])
def test_migrations_between_processes(cluster: LocalCluster, kills: int) -> None:
    arguments = {"shape": SHAPE, "config": CONFIG, "dtype": "float32", "device": "cpu"}
    spec = WorkerSpec("tests.e2e.test_migration.SeededEngine", arguments)
    engines = cluster.launch("engine", [spec, spec, spec], replaceable=True)
    cluster.wait_started()
    processes = engines.call("take_weights", phase="load")
    cluster.publish(0)
    for rank in range(3):
        engines.confirm(rank, 0)
    requests = [
        replace(request(group, member), ignore_stop=True, max_new_tokens=12)
        for group in range(8)
        for member in range(4)
    ]
    policy = RandomMoves(1, 0.4)
    manager = RolloutManager(
        engines,
        cluster.wait,
        revive=lambda: None,
        poll_seconds=0.0,
        reallocation=Reallocation(policy, LengthPredictor(limit=16), plan_seconds=0.0),
    )
    seen = 0

    def progress(done: int, total: int) -> None:
        nonlocal seen
        seen += 1
        if kills and policy.moves > 8 and processes:
            os.kill(processes.pop(), signal.SIGKILL)
            processes.clear()

    results = manager.generate(requests, opened(requests), "generate", progress)
    expected = generate(Pool([make_engine()]), requests)
    assert {name: result.tokens for name, result in results.items()} == {n: r.tokens for n, r in expected.items()}
    tail = manager.take_tail()
    assert tail.migrations > 8 and policy.moves > 8
