"""Work in the background of a wait: a replica of real processes that scores while the driver waits for another."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from rlhfspec_mega.cluster.interface import Call, WorkerSpec
from rlhfspec_mega.cluster.local import LocalCluster
from rlhfspec_mega.config.schema.training import ActorConfig
from rlhfspec_mega.megatron.description import ParallelSizes, describe
from rlhfspec_mega.rl.experience import Floats
from rlhfspec_mega.rl.microbatch import Shard
from rlhfspec_mega.rl.packing import Batching
from rlhfspec_mega.rollout.scoring import Scoring
from rlhfspec_mega.types import FinishReason, GenerationRequest, GenerationResult, Span
from rlhfspec_mega.workers.scorer_group import ScorerGroup
from tests.clusters import local_cluster
from tests.engine_pool import SHAPE
from tests.ledgers import finished_ledger
from tests.unit.test_local_cluster import spec


class Peer:
    """One of two ranks of a replica, whose first life ends in one of several ways."""

    def __init__(self, rank: int, end: str, launch: int) -> None:
        self._rank, self._end = rank, end if launch == 1 else ""

    def score(self, shards: Mapping[str, Shard]) -> tuple[dict[str, Floats], Span] | None:
        if self._end and self._rank == 1:
            time.sleep(0.4)
            if self._end == "after its peer has answered":
                raise RuntimeError("connection closed by peer")
            os._exit(9)
        if self._end == "while its peer is in a collective":
            time.sleep(60)
        if self._end == "after its peer has failed for it":
            raise RuntimeError("connection closed by peer")
        if self._end == "after its peer has answered":
            threading.Timer(0.2, os._exit, (9,)).start()
        scores = np.zeros(shards["reference"].samples.response_offsets[-1], np.float32)
        return ({"reference": scores}, Span("score", time.time(), 0.0, {})) if self._rank == 0 else None


class Work:
    """Implements cluster.interface.Background with nothing but scoring."""

    def __init__(self, scoring: Scoring) -> None:
        self.scoring = scoring

    def calls(self) -> Sequence[Call]:
        return self.scoring.calls()

    def handle_answers(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self.scoring.handle_answer(call)
        self.scoring.start()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    made = local_cluster(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    "end",
    ["while its peer is in a collective", "after its peer has failed for it", "after its peer has answered"],
)
def test_a_replica_that_dies_scores_its_batch_in_its_next_life(
    cluster: LocalCluster, end: str, background: bool
) -> None:
    """Nothing of it was in flight when the wait began: the work is begun by it."""
    peers = [
        WorkerSpec("tests.unit.test_background.Peer", {"rank": rank, "end": end}, numbered=True) for rank in (0, 1)
    ]
    reference = cluster.launch("reference", peers, replaceable=True, needs_weights=False, together=2)
    actor = cluster.launch("actor", [spec("a")])
    cluster.wait_started()
    description = describe("reference", SHAPE, ActorConfig(), ParallelSizes(tensor=2), temperature=1.0)
    replicas = ScorerGroup(cluster, reference, [description], {0: {0}}, Batching(64))
    work = Work(Scoring(replicas, 64, finished_ledger(["0"])))
    request = GenerationRequest("0", "0", (1, 2), 0, 9)
    work.scoring.add(request, GenerationResult("0", [3, 4, 5], [], [], FinishReason.STOP))
    deadline = time.monotonic() + 60
    while not work.scoring.done:
        assert time.monotonic() < deadline
        with cluster.beside(work) if background else nullcontext():
            actor.call("sleep", 0.5, phase="update")
        if not background:
            work.handle_answers(cluster.wait(work.calls(), "reference", first=True, check=False))
        cluster.wait_started()
    assert work.scoring.results["0"].tolist() == [0.0] * 3
    assert [reference.launches(rank) for rank in (0, 1)] == [2, 2]
