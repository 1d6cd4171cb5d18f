"""Weights from Megatron ranks to engines and back to disk, over both transports, with buckets smaller than tensors."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhfspec_mega.cluster.interface import WorkerSpec
from rlhfspec_mega.cluster.launchers import transport as open_transport
from rlhfspec_mega.cluster.liveness import WorkerState
from rlhfspec_mega.cluster.local import LocalCluster
from rlhfspec_mega.cluster.supervised import Group
from rlhfspec_mega.config.schema.generation import RolloutConfig
from rlhfspec_mega.config.schema.training import ActorConfig
from rlhfspec_mega.errors import RunError, WorkerDied
from rlhfspec_mega.models.hf_config import read_shape
from rlhfspec_mega.models.hf_directory import HfWeights
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.resharding.buckets import Bucket
from rlhfspec_mega.resharding.controller import Resharder
from rlhfspec_mega.rl.packing import Batching
from rlhfspec_mega.types import EngineLoad
from rlhfspec_mega.workers.model_group import ModelGroup
from rlhfspec_mega.workers.torch_engine import TorchEngineWorker
from tests.clusters import local_cluster, worker_process
from tests.contract.test_megatron_parity import make_models
from tests.megatron_probe import described, worker_specs

LAYOUTS = {
    "one": ActorConfig(tensor_parallel=1),
    "tp2": ActorConfig(tensor_parallel=2),
    "dp2": ActorConfig(tensor_parallel=1),
    "pp2": ActorConfig(tensor_parallel=1, pipeline_parallel=2),
    "pp2_interleaved": ActorConfig(tensor_parallel=1, pipeline_parallel=2, virtual_pipeline=2),
    "tp2_pp2": ActorConfig(tensor_parallel=2, pipeline_parallel=2),
}
RANKS = {"one": 1, "tp2": 2, "dp2": 2, "pp2": 2, "pp2_interleaved": 2, "tp2_pp2": 4}


class EngineUnderTest(TorchEngineWorker):
    """An engine that shows its weights, and can be told to misread a bucket, to be slow, or to die at some moment."""

    flip_in: int | None = None
    dies: str = ""
    slow = False

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.engine._model.hf_tensors().items()}

    def load(self) -> EngineLoad:
        return self.engine.load()

    def misread(self, bucket_id: int | None) -> None:
        self.flip_in = bucket_id

    def die(self, moment: str) -> None:
        self.dies = moment

    def be_slow(self) -> None:
        self.slow = True

    def connect(self, address: Any, index: int) -> None:
        self._die_if("connect")
        super().connect(address, index)
        receiver = self.receiver._receiver
        receive = receiver.receive

        def disturbed(bucket: Bucket) -> torch.Tensor:
            if bucket.id == 2:
                self._die_if("receive")
            data = receive(bucket)
            if bucket.id == self.flip_in:
                data = data.clone()
                data[5] ^= 1
            return data

        receiver.receive = disturbed

    def receive_weights(self, *arguments: Any) -> dict[int, int]:
        sums = super().receive_weights(*arguments)
        if self.dies == "after":
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if self.slow:
            self.slow = False
            time.sleep(3.0)
        return sums

    def end_update(self, version: int) -> None:
        self._die_if("end")
        super().end_update(version)

    def _die_if(self, moment: str) -> None:
        if self.dies == moment:
            os.kill(os.getpid(), signal.SIGKILL)


def launch(cluster: LocalCluster, layout: str, model: Path, tmp_path: Path) -> tuple[ModelGroup, Group]:
    shape = read_shape(model)
    actor_description = described(shape, LAYOUTS[layout], RANKS[layout])
    rollout = RolloutConfig(max_prompt_tokens=16, max_new_tokens=16, max_running_requests=2)
    engine = WorkerSpec(
        "tests.e2e.test_resharding.EngineUnderTest",
        {"shape": shape, "config": rollout, "dtype": "float32", "device": "cpu"},
    )
    actor = cluster.launch("actor", worker_specs(tmp_path / "meet", [actor_description]))
    engines = cluster.launch("engine", [engine, engine], replaceable=True)
    cluster.wait_started()
    return ModelGroup(actor, actor_description, Batching(64)), engines


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    made = local_cluster(tmp_path)
    yield made
    made.close()


def resharder(cluster: LocalCluster, actor: ModelGroup, model: Path, transport: str) -> Resharder:
    shape = read_shape(model)
    tensors = mapping_for(shape.architecture).hf_tensors(shape)
    open_host = open_transport(transport, cluster, 60.0)
    return Resharder(cluster, actor, tensors, open_host=open_host, bucket_bytes=5000)


@pytest.mark.parametrize(
    ("layout", "architecture", "transport"),
    [
        ("one", "llama_tied", "collective"),
        ("tp2", "qwen3", "shared_memory"),
        ("dp2", "llama", "shared_memory"),
        ("pp2", "qwen2", "collective"),
        ("pp2_interleaved", "llama_tied", "shared_memory"),
        ("tp2_pp2", "llama_tied", "shared_memory"),
    ],
)
def test_engines_and_disk_get_the_very_same_bits(
    layout: str, architecture: str, transport: str, models: dict, cluster: LocalCluster, tmp_path: Path
) -> None:
    model = models[architecture]
    weights = HfWeights(model)
    actor, engines = launch(cluster, layout, model, tmp_path)
    actor.load_weights(model)
    stream = resharder(cluster, actor, model, transport)
    assert len(stream.buckets) > 5
    for version in (0, 1):
        cluster.publish(version)
        assert stream.update(engines, [0, 1], version) == [0, 1] == engines.serving()
        for held in engines.call("weights", phase="test"):
            assert held.keys() == set(weights.names())
            assert all(torch.equal(tensor, weights.get(name)) for name, tensor in held.items())
        assert [load.policy_version for load in engines.call("load", phase="test")] == [version, version]
    exported = {name: tensor.clone() for name, tensor in stream.stream()}
    assert exported.keys() == set(weights.names())
    assert all(torch.equal(tensor, weights.get(name)) for name, tensor in exported.items())
    stream.close()


def test_a_wrong_bit_stops_the_run_with_the_buckets_names(models: dict, cluster: LocalCluster, tmp_path: Path) -> None:
    model = models["llama_tied"]
    actor, engines = launch(cluster, "tp2", model, tmp_path)
    actor.load_weights(model)
    stream = resharder(cluster, actor, model, "shared_memory")
    stream.update(engines, [0, 1], 0)
    bad = stream.buckets[3]
    engines.call("misread", bad.id, phase="test", ranks=[1])
    with pytest.raises(RunError, match=rf"engine 1 received differ.*bucket {bad.id} \(.*{bad.names[0]}"):
        stream.update(engines, [0, 1], 1)
    assert [load.policy_version for load in engines.call("load", phase="test")] == [0, 0], "version 1 went live"
    stream.close()


@pytest.mark.parametrize("transport", ["shared_memory", "collective"])
def test_an_engine_that_dies_in_an_update_is_left_out_and_joins_the_next(
    transport: str, models: dict, cluster: LocalCluster, tmp_path: Path
) -> None:
    model = models["llama_tied"]
    weights = HfWeights(model)
    actor, engines = launch(cluster, "tp2", model, tmp_path)
    actor.load_weights(model)
    stream = resharder(cluster, actor, model, transport)

    def update(version: int, *expected: list[int]) -> None:
        cluster.publish(version)
        holding = stream.update(engines, [0, 1], version)
        assert holding in expected and holding == engines.serving()
        for held in engines.call("weights", phase="test", ranks=holding):
            assert all(torch.equal(tensor, weights.get(name)) for name, tensor in held.items())

    update(0, [0, 1])
    for number, moment in enumerate(["receive", "after", "end", "connect"]):
        victim = number % 2  # the other was restarted in the round before, so that both connect again
        engines.call("die", moment, phase="test", ranks=[victim])
        engines.call("be_slow", phase="test", ranks=[1 - victim])
        # Where connecting has to begin anew, the victim's successor may be there by then.
        update(number + 1, [1 - victim], *([[0, 1]] if moment == "connect" else []))
        cluster.wait_started()
        assert engines.launches(victim) == number // 2 + 2
    update(9, [0, 1])
    stream.close()


def test_an_actors_death_ends_the_waits_of_an_export_and_of_an_update(
    models: dict, cluster: LocalCluster, tmp_path: Path
) -> None:
    """Only its death can end these waits before the deadline; the engines come back from theirs."""
    model = models["llama_tied"]
    actor, engines = launch(cluster, "tp2", model, tmp_path)
    actor.load_weights(model)
    stream = resharder(cluster, actor, model, "shared_memory")
    cluster.publish(0)
    stream.update(engines, [0, 1], 0)
    exported = stream.stream()
    next(exported)
    rank = worker_process("actor-0")
    assert rank is not None
    rank.kill()
    with pytest.raises(WorkerDied, match="phase 'export', actor rank 0 died"):
        list(exported)
    receives = [engines.start(rank, "receive_weights", 1, [], stream.buckets) for rank in (0, 1)]
    stream.close()
    cluster.end("actor")
    cluster.settle("engine", 30.0)
    assert engines.ranks(WorkerState.SERVING) == [0, 1], "none was given up"
    assert all("the transport was closed" in str(call.error) for call in receives)
