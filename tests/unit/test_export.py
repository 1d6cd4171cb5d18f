"""An exporter whose sending end fails: the other tensor-parallel rank is not left waiting in a gather."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from torch import Tensor

from rlhfspec_mega.cluster.local import LocalCluster
from rlhfspec_mega.cluster.supervised import Group
from rlhfspec_mega.config.schema.training import ActorConfig
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.resharding.buckets import Bucket, plan_buckets
from tests.clusters import local_cluster
from tests.megatron_probe import described, worker_specs

SHAPE = ModelShape("llama", 16, 2, 4, 2, 4, 32, 64, 32, 10000.0, 1e-6, tie_embeddings=False)
BUCKETS = plan_buckets(mapping_for("llama").hf_tensors(SHAPE), lambda name: 0, 3000)
# A bucket that cannot be packed: after its first piece, in the middle of Q, K and V, no dtype is right.
UNPACKABLE = [
    replace(
        bucket,
        pieces=tuple(replace(piece, dtype="complex7") if "k_proj" in piece.name else piece for piece in bucket.pieces),
    )
    for bucket in BUCKETS
]


@dataclass(frozen=True)
class End:
    """Address and sender in one: takes buckets up to one that it fails at, with an error of no kind of ours."""

    fails_at: int | None = None

    def sender(self, owner: int) -> End:
        return self

    def send(self, bucket: Bucket, buffer: Tensor) -> None:
        if bucket.id == self.fails_at:
            raise MemoryError("the store is full")

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalCluster, Group]]:
    directory = tmp_path_factory.mktemp("export")
    cluster = local_cluster(directory)
    model = described(SHAPE, ActorConfig(tensor_parallel=2), ranks=2)
    group = cluster.launch("actor", worker_specs(directory / "meet", [model]))
    cluster.wait_started()
    yield cluster, group
    cluster.close()


@pytest.mark.parametrize(
    ("end", "buckets", "error"),
    [(End(fails_at=1), BUCKETS, "the store is full"), (End(), UNPACKABLE, "complex7")],
    ids=["send", "pack"],
)
def test_the_other_rank_is_released(
    end: End, buckets: list[Bucket], error: str, actor: tuple[LocalCluster, Group]
) -> None:
    cluster, group = actor
    assert len(buckets) > 5
    group.call("connect", "engines", end, 0, phase="connect", ranks=[0])
    calls = [group.start(rank, "send_weights", "actor", "engines", buckets) for rank in range(2)]
    cluster.wait(calls, "reshard", check=False)  # its deadline is far below that of a gather
    assert error in str(calls[0].error)
    assert calls[1].result() == {}
    group.call("connect", "engines", End(), 0, phase="connect", ranks=[0])  # and they are in step still
    sums = group.call("send_weights", "actor", "engines", BUCKETS, phase="reshard")[0]
    assert set(sums) == {bucket.id for bucket in BUCKETS}
