"""Samples move between engine processes; one of them dies at every point of a migration."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhfspec_mega.cluster.interface import WorkerSpec
from rlhfspec_mega.cluster.local import LocalCluster
from rlhfspec_mega.models.initialize import initial_tensors
from rlhfspec_mega.planning.lengths import LengthPredictor
from rlhfspec_mega.rollout import reallocation
from rlhfspec_mega.rollout.manager import RolloutManager
from rlhfspec_mega.rollout.migration.arrivals import Arrivals
from rlhfspec_mega.rollout.migration.departures import Departures, _OutgoingSample
from rlhfspec_mega.rollout.migration.messages import Arrival
from rlhfspec_mega.rollout.reallocation import Reallocation
from rlhfspec_mega.workers.torch_engine import TorchEngineWorker
from tests.clusters import local_cluster
from tests.engine_pool import CONFIG, SHAPE, TENSORS, Pool, generate, make_engine, opened, request
from tests.unit.test_migration import RandomMoves

# In a migration's order: what an engine does with a sample that goes with its KV, and whether it dies before or after.
MOMENTS: dict[str, tuple[type, str, bool]] = {
    "stage one is copied": (Departures, "_copy_some", False),
    "stage two begins": (Departures, "_hand_over", True),
    "sent, not acknowledged": (Departures, "_hand_over", False),
    "arrived, not acknowledged": (Arrivals, "_take", True),
    "acknowledged, not reported": (Arrivals, "_take", False),
}


def has_kv(one: Any) -> bool:
    """Whether an argument of those methods is of a sample whose KV was copied."""
    return isinstance(one, _OutgoingSample) or (isinstance(one, Arrival) and one.staging is not None)


class MortalEngine(TorchEngineWorker):
    """An engine with the weights of tests.engine_pool.make_engine, whose process may be killed in a migration."""

    def take_weights(self) -> None:
        self.engine.begin_update(0, TENSORS)
        self.engine.update_weights(
            [(name, 0, tensor.flatten()) for name, tensor in initial_tensors(TENSORS, 1, seed=1)]
        )
        self.end_update(0)

    def die_when(self, moment: str, sign: Path) -> None:
        """Leave a sign and die, unless another engine has."""
        owner, name, before = MOMENTS[moment]
        done = getattr(owner, name)

        def die() -> None:
            with contextlib.suppress(FileExistsError):
                sign.touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)

        def deadly(*arguments: Any, **named: Any) -> Any:
            fatal = any(map(has_kv, arguments))
            if fatal and before:
                die()
            result = done(*arguments, **named)
            if fatal and not before:
                die()
            return result

        setattr(owner, name, deadly)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    cluster = local_cluster(tmp_path)
    yield cluster
    cluster.close()


@pytest.mark.parametrize("moment", [None, *MOMENTS])
def test_migrations_between_processes(
    cluster: LocalCluster, moment: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reallocation, "PLAN_SHARE", 1.0)  # many moves in so short a rollout
    arguments = {"shape": SHAPE, "config": CONFIG, "dtype": "float32", "device": "cpu"}
    spec = WorkerSpec("tests.e2e.test_migration.MortalEngine", arguments)
    engines = cluster.launch("engine", [spec, spec, spec], replaceable=True)
    cluster.wait_started()
    engines.call("take_weights", phase="load")
    cluster.publish(0)
    for rank in range(3):
        engines.confirm(rank, 0)
    sign = tmp_path / "died"
    if moment:
        engines.call("die_when", moment, sign, phase="arm")
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
    results = manager.generate(requests, opened(requests), "generate")
    assert sign.exists() == (moment is not None)
    expected = generate(Pool([make_engine()]), requests)
    assert {name: result.tokens for name, result in results.items()} == {n: r.tokens for n, r in expected.items()}
    tail = manager.take_tail()
    assert tail.migrations > 8 and policy.moves > 8
