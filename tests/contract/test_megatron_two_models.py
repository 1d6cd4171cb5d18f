"""Two models of unlike parallel sizes in the same processes: each trains as it does alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from rlhfspec_mega.config.schema.training import ActorConfig, OptimizerConfig
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.megatron.description import ParallelSizes
from rlhfspec_mega.megatron.model import on_megatron
from rlhfspec_mega.planning.placement import Residency
from rlhfspec_mega.rl.experience import Experience
from rlhfspec_mega.rl.packing import Batching
from rlhfspec_mega.workers.megatron import MegatronWorker
from rlhfspec_mega.workers.model_group import ModelGroup
from tests.clusters import local_cluster
from tests.contract.test_megatron_parity import make_models
from tests.megatron_probe import described, merged, negative_logprob, worker_specs

OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=0)
TP2 = ActorConfig(tensor_parallel=2, sequence_parallel=True, optimizer=OPTIMIZER)
PP2 = ActorConfig(tensor_parallel=1, pipeline_parallel=2, optimizer=OPTIMIZER)
SAMPLES = Experience.of([[5, 7], [23], [4, 4, 9]], [[11, 13, 17, 19], [29, 31, 37], [50, 60]])


class TwoModels(MegatronWorker):
    """Also tells gradients, and whether Megatron's globals were initialized."""

    @on_megatron
    def gradients(self, model: str) -> dict[str, torch.Tensor] | None:
        return merged(self._models[model], use_gradients=True)

    def uses_globals(self) -> bool:
        return parallel_state.is_initialized()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


def trained(directory: Path, chosen: dict[str, tuple[Path, ActorConfig]]) -> dict[str, list[Any]]:
    """Losses and gradients of three updates of each model in turn, all in the same two processes."""
    descriptions = [replace(described(path, config, ranks=2), name=name) for name, (path, config) in chosen.items()]
    cluster = local_cluster(directory)
    try:
        kind = "tests.contract.test_megatron_two_models.TwoModels"
        workers = cluster.launch("models", worker_specs(directory / "meet", descriptions, kind=kind))
        cluster.wait_started()
        groups = [ModelGroup(workers, description, Batching(24)) for description in descriptions]
        for group, (path, _) in zip(groups, chosen.values(), strict=True):
            group.load_weights(path)
        found: dict[str, list[Any]] = {name: [] for name in chosen}
        for _ in range(3):
            for group in groups:
                loss = group.accumulate(SAMPLES, negative_logprob, [])["loss"]
                parts = workers.call("gradients", group.description.name, phase="gradients")
                gradients = {name: tensor for part in parts if part for name, tensor in part.items()}
                found[group.description.name].append((loss, gradients))
                group.step()
        assert workers.call("uses_globals", phase="test") == [False, False]
        return found
    finally:
        cluster.close()


def test_each_trains_as_it_does_alone(models: dict[str, Path], tmp_path: Path) -> None:
    chosen = {"policy": (models["qwen3"], TP2), "other": (models["llama_tied"], PP2)}
    together = trained(tmp_path / "both", chosen)
    for name, one in chosen.items():
        alone = trained(tmp_path / name, {name: one})[name]
        for (loss, gradients), (own_loss, own) in zip(together[name], alone, strict=True):
            assert loss == pytest.approx(own_loss, abs=1e-6) and gradients.keys() == own.keys()
            assert max(float((gradients[key] - own[key]).abs().max()) for key in own) < 1e-6
        assert together[name][0][0] > together[name][2][0], "it learns"


def test_a_frozen_copy_stays_as_it_was(models: dict[str, Path], tmp_path: Path) -> None:
    """An actor and its reference in the same processes, which rests in host memory between its calls."""
    actor = described(models["llama"], TP2, ranks=2)
    reference = replace(actor, name="reference", learning=None, rests=Residency.HOST)
    cluster = local_cluster(tmp_path)
    try:
        workers = cluster.launch("models", worker_specs(tmp_path / "meet", [actor, reference]))
        cluster.wait_started()
        groups = [ModelGroup(workers, one, Batching(24)) for one in (actor, reference)]
        for group in groups:
            group.load_weights(models["llama"])
        before, _ = groups[0].logprobs(SAMPLES, "logprobs")
        groups[0].accumulate(SAMPLES, negative_logprob, [])
        groups[0].offload()
        groups[0].onload()
        groups[0].step()
        after, _ = groups[0].logprobs(SAMPLES, "logprobs")
        frozen, _ = groups[1].logprobs(SAMPLES, "reference")
    finally:
        cluster.close()
    assert (frozen == before).all() and abs(after - before).max() > 1e-3


def test_sizes_that_cannot_be_had_are_refused() -> None:
    with pytest.raises(UserError, match="expert-parallel size of 2 is not possible: use 1"):
        ParallelSizes(expert=2)
