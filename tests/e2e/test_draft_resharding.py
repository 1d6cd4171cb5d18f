"""A draft's weights from the actor's last stage to engines, beside the actor's own, with deaths and wrong bits."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhfspec_mega.cluster.interface import WorkerSpec
from rlhfspec_mega.cluster.launchers import transport
from rlhfspec_mega.cluster.local import LocalCluster
from rlhfspec_mega.cluster.supervised import Group
from rlhfspec_mega.config.schema.generation import RolloutConfig, SpeculationConfig
from rlhfspec_mega.config.schema.training import ActorConfig
from rlhfspec_mega.draft.directory import read_draft_shape, write_draft
from rlhfspec_mega.draft.distillation import initial_draft
from rlhfspec_mega.draft.shape import draft_shape, draft_tensors
from rlhfspec_mega.errors import RunError
from rlhfspec_mega.models.hf_config import read_shape
from rlhfspec_mega.models.hf_directory import HfWeights
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.resharding.buckets import Bucket
from rlhfspec_mega.resharding.controller import Resharder
from rlhfspec_mega.rl.packing import Batching
from rlhfspec_mega.types import EngineLoad, WeightTarget
from rlhfspec_mega.workers.draft import DraftGroup
from rlhfspec_mega.workers.model_group import ModelGroup
from rlhfspec_mega.workers.torch_engine import TorchEngineWorker
from tests.clusters import local_cluster
from tests.e2e.conftest import make_model
from tests.megatron_probe import described, worker_specs


class DraftingEngine(TorchEngineWorker):
    """An engine with a draft that shows its weights, and can be told to misread or to die at its next bucket."""

    trouble = ""

    def draft_weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.engine._decoder.drafter.model.tensors().items()}

    def load(self) -> EngineLoad:
        return self.engine.load()

    def make_trouble(self, kind: str) -> None:
        self.trouble = kind

    def connect(self, address: Any, index: int) -> None:
        super().connect(address, index)
        receiver = self.receiver._receiver
        receive = receiver.receive

        def disturbed(bucket: Bucket) -> torch.Tensor:
            data = receive(bucket)
            if self.trouble == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.trouble == "misread" and bucket.id == 1:
                data = data.clone()
                data[3] ^= 4
            return data

        receiver.receive = disturbed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "random")


@pytest.fixture(scope="module")
def draft(model: Path) -> Path:
    shape = draft_shape(read_shape(model))
    weights = initial_draft(shape, HfWeights(model).get("model.embed_tokens.weight"), seed=5)
    write_draft(model.parent / "draft", shape, weights)
    return model.parent / "draft"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    made = local_cluster(tmp_path)
    yield made
    made.close()


def launch(cluster: LocalCluster, model: Path, draft: Path, tmp_path: Path) -> tuple[Group, Group, Resharder]:
    """Two pipeline stages, two engines, and both targets planned."""
    shape, layout = read_shape(model), ActorConfig(tensor_parallel=1, pipeline_parallel=2)
    described_actor = described(shape, layout, ranks=2)
    specs = worker_specs(tmp_path / "meet", [described_actor])
    rollout = RolloutConfig(max_prompt_tokens=16, max_new_tokens=16, max_running_requests=2)
    settings = {"shape": shape, "config": rollout, "dtype": "float32", "device": "cpu"}
    settings |= {"draft": draft, "drafting": SpeculationConfig(policy="adaptive")}
    engine = WorkerSpec("tests.e2e.test_draft_resharding.DraftingEngine", settings)
    actor, engines = cluster.launch("actor", specs), cluster.launch("engine", [engine, engine], replaceable=True)
    cluster.wait_started()
    group = ModelGroup(actor, described_actor, Batching(64))
    group.load_weights(model)
    DraftGroup(actor, group, draft, None)
    tensors = mapping_for(shape.architecture).hf_tensors(shape)
    open_host = transport("shared_memory", cluster, 60.0)
    resharder = Resharder(cluster, group, tensors, open_host=open_host, bucket_bytes=5000)
    resharder.plan(WeightTarget.DRAFT, draft_tensors(read_draft_shape(draft, shape)))
    return actor, engines, resharder


def test_both_targets_share_one_transport_and_its_care(
    model: Path, draft: Path, cluster: LocalCluster, tmp_path: Path
) -> None:
    _, engines, resharder = launch(cluster, model, draft, tmp_path)
    weights = HfWeights(draft)

    def update_actor(version: int) -> None:
        cluster.publish(version)
        assert resharder.update(engines, [0, 1], version) == [0, 1] == engines.serving()

    def update_draft(version: int, holders: list[int], policy_version: int) -> None:
        assert resharder.update(engines, [0, 1], version, WeightTarget.DRAFT) == holders == engines.serving()
        for held in engines.call("draft_weights", phase="test", ranks=holders):
            assert held and all(torch.equal(tensor, weights.get(name)) for name, tensor in held.items())
        loads = engines.call("load", phase="test", ranks=holders)
        assert [load.policy_version for load in loads] == [policy_version] * len(holders)

    update_actor(0)
    update_draft(7, [0, 1], 0)
    engines.call("make_trouble", "die", phase="test", ranks=[0])
    update_draft(8, [1], 0)
    cluster.wait_started()
    update_actor(1)
    update_draft(8, [0, 1], 1)
    resharder.close()


def test_a_wrong_bit_of_the_draft_is_named(model: Path, draft: Path, cluster: LocalCluster, tmp_path: Path) -> None:
    _, engines, resharder = launch(cluster, model, draft, tmp_path)
    cluster.publish(0)
    resharder.update(engines, [0, 1], 0)
    engines.call("make_trouble", "misread", phase="test", ranks=[1])
    with pytest.raises(RunError, match=r"engine 1 received differ.*bucket 1 \(.*fc.weight"):
        resharder.update(engines, [0, 1], 1, WeightTarget.DRAFT)
    resharder.close()
