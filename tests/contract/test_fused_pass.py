"""Two models that train in one pass, with pipelines in opposite directions: the gradients of each one alone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhfspec_mega.cluster.local import LocalCluster
from rlhfspec_mega.cluster.supervised import Group
from rlhfspec_mega.config.schema.training import ActorConfig, OptimizerConfig
from rlhfspec_mega.errors import RunError
from rlhfspec_mega.megatron.gradient_pass import GradientPass
from rlhfspec_mega.megatron.model import on_megatron
from rlhfspec_mega.planning.pipeline.fused_model import FusedModel
from rlhfspec_mega.planning.pipeline.fusion import FusedPlan, FusionPlanner
from rlhfspec_mega.planning.pipeline.rank_task import RankTask
from rlhfspec_mega.planning.pipeline.schedule import timed
from rlhfspec_mega.rl.experience import Experience
from rlhfspec_mega.rl.microbatch import Objective
from rlhfspec_mega.rl.packing import Batching
from rlhfspec_mega.workers.fused_group import FusedGroup
from rlhfspec_mega.workers.megatron import MegatronWorker
from rlhfspec_mega.workers.model_group import ModelGroup
from tests.clusters import local_cluster
from tests.contract.test_megatron_parity import make_models
from tests.megatron_probe import described, merged, negative_logprob, worker_specs
from tests.pipeline_problems import equal_problem, random_orders

OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=0)
BATCHING = Batching(24, packed=False)


class Fusing(MegatronWorker):
    """Also tells gradients and live micro-batches, and can get into trouble."""

    _most_live = 0

    @on_megatron
    def gradients(self, model: str) -> dict[str, torch.Tensor] | None:
        return merged(self._models[model], use_gradients=True)

    def watch(self, trouble: str | None = None) -> None:
        """Count live micro-batches of all models; in the second backward of the actor, end or stop if wanted."""
        passes: dict[str, GradientPass] = {}
        for name, one in self._models.items():
            make = one.gradient_pass

            def kept(*arguments: Any, name: str = name, make: Any = make) -> GradientPass:
                passes[name] = make(*arguments)
                return passes[name]

            one.gradient_pass = kept  # type: ignore[method-assign]

        def computed(task: RankTask, began: float) -> None:
            self._most_live = max(self._most_live, sum(len(one._live) for one in passes.values()))
            if trouble and task.model == "actor" and task.backward and len(passes["actor"]._live) < 6:
                os.kill(os.getpid(), getattr(signal, trouble))

        self._fused.accumulate = partial(self._fused.accumulate, computed=computed)  # type: ignore[method-assign]

    def most_live(self) -> int:
        found, self._most_live = self._most_live, 0
        return found


@dataclass(frozen=True)
class Case:
    """Ranks, pipeline stages of both, tensor-parallel size, models of make_models."""

    stages: tuple[int, int]
    tensor: int = 1
    models: tuple[str, str] = ("llama", "llama_tied")
    packed: bool = False
    dtype: str = "float32"
    data: int = 1

    @property
    def ranks(self) -> int:
        return self.stages[0] * self.tensor * self.data


SAMPLES = Experience.of(
    [[5, 7], [23], [4, 4, 9], [8], [1, 2], [3, 3], [60], [12, 1]],
    [[11, 13, 17, 19], [29, 31, 37], [50, 60], [2] * 9, [7, 8, 9], [40] * 6, [5], [33, 44, 55, 66, 77]],
)


class GivenPlan(FusionPlanner):
    """A planner whose plan is a random valid schedule that keeps the order of micro-batches."""

    def __init__(self, seed: int, *arguments: Any) -> None:
        super().__init__(*arguments, always=True, fixed_costs=True)
        self._seed = seed

    def plan(self, tokens: Mapping[str, Sequence[Sequence[int]]]) -> FusedPlan:
        first, second = (tokens[one.name] for one in self._models)
        beside, tasks = len(second) // len(first), []
        for place, batches in enumerate(first):
            problem = self._problem([batches], second[place * beside : (place + 1) * beside])
            tasks.append(self._rank_tasks(problem, timed(problem, random_orders(problem, self._seed + place))))
        return FusedPlan(tasks, 1.0, 1.0)


class Pair:
    """An actor and a critic on the ranks of a case."""

    def __init__(self, case: Case, models: dict[str, Path], directory: Path, call_timeout: float = 600.0) -> None:
        self.cluster: LocalCluster = local_cluster(directory)
        actor = ActorConfig(
            tensor_parallel=case.tensor,
            pipeline_parallel=case.stages[0],
            sequence_parallel=case.tensor > 1,
            dtype=case.dtype,
            optimizer=OPTIMIZER,
        )
        critic = replace(actor, pipeline_parallel=case.stages[1])
        self.descriptions = []
        for name, config, model in zip(("actor", "critic"), (actor, critic), case.models, strict=True):
            one = replace(described(models[model], config, ranks=case.ranks), name=name)
            opposed = case.stages[0] if name == "critic" else 0
            self.descriptions.append(replace(one, parallel=replace(one.parallel, opposed_to=opposed)))
        specs = worker_specs(directory / "meet", self.descriptions, kind="tests.contract.test_fused_pass.Fusing")
        for spec in specs:
            spec.arguments["rendezvous"] = replace(spec.arguments["rendezvous"], call_timeout=call_timeout)
        self.workers: Group = self.cluster.launch("actor", specs)
        self.cluster.wait_started()
        batching = Batching(1 if not case.packed else 12, packed=case.packed)
        self.groups = [ModelGroup(self.workers, one, batching) for one in self.descriptions]
        for group, model in zip(self.groups, case.models, strict=True):
            group.load_weights(models[model])

    def gradients(self, name: str) -> dict[str, torch.Tensor]:
        parts = self.workers.call("gradients", name, phase="gradients")
        return {key: tensor for part in parts if part for key, tensor in part.items()}

    def alone(self) -> dict[str, tuple[float, dict[str, torch.Tensor]]]:
        """Loss and gradients of each model under Megatron's own schedule."""
        found = {}
        for group in self.groups:
            loss = group.accumulate(SAMPLES, negative_logprob, [])["loss"]
            found[group.description.name] = loss, self.gradients(group.description.name)
        return found

    def fused(self, planner: FusionPlanner) -> dict[str, tuple[float, dict[str, torch.Tensor]]]:
        answers = FusedGroup(self.workers, *self.groups, planner).accumulate(
            SAMPLES, {name: Objective(negative_logprob, []) for name in ("actor", "critic")}
        )
        assert answers is not None
        return {name: (found["loss"], self.gradients(name)) for name, (found, _, _) in answers.items()}

    def planner(self, kind: Any = FusionPlanner, *first: Any, **more: Any) -> FusionPlanner:
        parts = [
            FusedModel(one.name, one.parallel.pipeline, [1.0] * one.parallel.pipeline, [1.0] * one.parallel.pipeline)
            for one in self.descriptions
        ]
        return kind(*first, *parts, **more)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


CASES = {
    "2,2": Case((2, 2)),
    "2,2 packed": Case((2, 2), packed=True),
    "4,2": Case((4, 2), models=("llama_tied", "qwen3")),
    "4,4": Case((4, 4), models=("qwen2", "llama_tied")),
    "4,1": Case((4, 1), models=("llama", "llama")),
    "2,2 bfloat16": Case((2, 2), dtype="bfloat16"),
    "2,2 TP 2": Case((2, 2), tensor=2),
    "2,2 DP 2": Case((2, 2), data=2),
    "2,1 DP 2": Case((2, 1), data=2, models=("llama_tied", "llama_tied")),
}


@pytest.fixture(scope="module", params=CASES)
def pair(
    request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    one = Pair(CASES[request.param], models, tmp_path_factory.mktemp("pair"))
    try:
        yield one
    finally:
        one.cluster.close()


def test_the_gradients_of_each_model_alone(pair: Pair) -> None:
    """Bit for bit by any valid schedule that keeps the order of micro-batches; a plan may change it."""
    alone = pair.alone()
    for seed in range(4):
        for name, (loss, gradients) in pair.fused(pair.planner(GivenPlan, seed)).items():
            own_loss, own = alone[name]
            assert loss == own_loss and gradients.keys() == own.keys()
            tolerance = 0.0 if pair.descriptions[0].parallel.tensor == 1 else 1e-6
            assert max(float((gradients[key] - own[key]).abs().max()) for key in own) <= tolerance, (name, seed)
    relative = 1e-6 if pair.descriptions[0].dtype == "float32" else 2e-2
    for name, (_, gradients) in pair.fused(pair.planner(always=True, fixed_costs=False)).items():
        _, own = alone[name]
        assert max(float((gradients[key] - own[key]).abs().max() / own[key].abs().max()) for key in own) < relative


def test_live_micro_batches_are_those_of_the_schedule(pair: Pair) -> None:
    if pair.descriptions[0].parallel.data > 1:
        pytest.skip("with one replica of the actor")
    pair.workers.call("watch", phase="test")
    planner = pair.planner(GivenPlan, 5)
    pair.fused(planner)
    shards = [[shard.micro_batch_positions for shard in group.shards(SAMPLES)] for group in pair.groups]
    problem = equal_problem(
        [one.parallel.pipeline for one in pair.descriptions], [len(parts[0]) for parts in shards], (1, 1)
    )
    planned = timed(problem, random_orders(problem, 5)).peaks
    stages = [position.pp for position in pair.groups[0].positions]
    assert pair.workers.call("most_live", phase="test") == [planned[stage] for stage in stages]


@pytest.mark.parametrize("trouble", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_dies_or_stops_is_named(models: dict[str, Path], tmp_path: Path, trouble: str) -> None:
    """Its neighbour says which task waited for which rank."""
    one = Pair(Case((2, 2)), models, tmp_path, call_timeout=4.0)
    try:
        one.workers.call("watch", trouble, phase="test", ranks=[1])
        planner = one.planner(always=True, fixed_costs=True)
        objectives = {name: Objective(negative_logprob, []) for name in ("actor", "critic")}
        shards = {group.description.name: group.shards(SAMPLES) for group in one.groups}
        plan = planner.plan({name: [part.micro_batch_positions for part in parts] for name, parts in shards.items()})
        assert plan is not None
        parts = [found[0] for found in shards.values()]
        calls = [
            one.workers.start(rank, "accumulate_fused", plan.tasks[0][rank], objectives, *parts) for rank in range(2)
        ]
        end = time.monotonic() + 30
        while not calls[0].done and time.monotonic() < end:
            with suppress(RunError):  # that rank 1 died, which the driver knows at once, or the one that is wanted
                one.cluster.look("update", calls)
            time.sleep(0.05)
        said = str(calls[0].error)
        assert "of the " in said and "'s micro-batch " in said and "(rank 0) waited " in said and "for rank 1: " in said
        assert ("forward" in said or "backward" in said) and "on stage " in said
    finally:
        one.cluster.close()
