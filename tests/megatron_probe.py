"""Workers for tests: a model's rank that also reports gradients and weights under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import rlhfspec_mega.megatron.quick_start  # noqa: F401
from rlhfspec_mega.cluster.interface import WorkerSpec
from rlhfspec_mega.cluster.local import LocalCluster
from rlhfspec_mega.cluster.supervised import Group
from rlhfspec_mega.config.schema.training import ActorConfig
from rlhfspec_mega.megatron.checkpoint_files import SavedPart
from rlhfspec_mega.megatron.description import Learning, ModelDescription, ParallelRanks, ParallelSizes, describe
from rlhfspec_mega.megatron.groups import positions
from rlhfspec_mega.megatron.model import MegatronModel, on_megatron
from rlhfspec_mega.megatron.process import join, leave, seed_megatron
from rlhfspec_mega.megatron.rendezvous import Rendezvous
from rlhfspec_mega.megatron.weights import mapped_parameters, merge_parameter
from rlhfspec_mega.models.hf_config import read_shape
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.rl.microbatch import MicroBatch
from tests.clusters import local_cluster


def negative_logprob(
    logprobs: torch.Tensor, entropy: torch.Tensor, batch: MicroBatch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Supervised loss: what transformers' Llama can be asked for too."""
    return -logprobs, {"entropy": entropy}


def described(
    model: Path | ModelShape, config: ActorConfig, ranks: int, temperature: float = 1.0, total_updates: int = 100
) -> ModelDescription:
    """A model that learns, by the name of "actor"."""
    shape = model if isinstance(model, ModelShape) else read_shape(model)
    learning = Learning(config.optimizer, total_updates)
    return describe(
        "actor", shape, config, ParallelSizes.of_actor(config, ranks), temperature=temperature, learning=learning
    )


def worker_specs(
    meeting_point: Path,
    models: Sequence[ModelDescription],
    seed: int = 0,
    kind: str = "rlhfspec_mega.workers.megatron.MegatronWorker",
) -> list[WorkerSpec]:
    """The workers of these models, which meet in a file."""
    world = models[0].parallel.ranks
    return [
        WorkerSpec(
            kind,
            {
                "models": models,
                "rendezvous": Rendezvous(f"file://{meeting_point}", rank, world, 600.0),
                "device": "cpu",
                "seed": seed,
            },
            devices=(rank,),
        )
        for rank in range(world)
    ]


class Probe:
    """Rebuilds a model per case, so that one set of processes serves many cases of the same parallel sizes."""

    def __init__(self, rank: int, world_size: int, meeting_point: str, device: str = "cpu") -> None:
        torch.set_num_threads(1)
        self.rank, self.world_size, self.meeting_point, self.device = rank, world_size, meeting_point, device
        self.builds = 0

    def build(self, config: ActorConfig, model: Path, temperature: float = 1.0, load: bool = True) -> ParallelRanks:
        leave()
        self.builds += 1
        rendezvous = Rendezvous(f"file://{self.meeting_point}.{self.builds}", self.rank, self.world_size, 60)
        device = torch.device("cuda:0" if self.device == "cuda" else self.device)
        join(rendezvous, device)
        description = described(model, config, self.world_size, temperature)
        seed_megatron(0, positions(description.parallel)[self.rank])
        self.actor = MegatronModel(description, range(self.world_size), device, 60.0)
        if load:
            self.actor.load_weights(model)
        return self.actor.position

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.actor, method)(*args)

    def save(self, directory: Path) -> SavedPart:
        return self.actor.write(self.actor.stage(copy=True), directory)

    def update(
        self, shards: list[list[MicroBatch]], loss: Any = negative_logprob, metrics: tuple[str, ...] = ("entropy",)
    ) -> dict[str, float]:
        return self.actor.accumulate(shards[self.actor.position.dp], loss, metrics)[0] | self.actor.step()

    def betas(self) -> list[tuple[float, float]]:
        return sorted({tuple(group["betas"]) for group in self.actor.optimizer.param_groups})

    @on_megatron
    def gradients(self, batches: list[MicroBatch], loss: Any = negative_logprob) -> dict[str, torch.Tensor] | None:
        """Averaged gradients by Hugging Face name (first TP rank of each stage); the weights are left as they were."""
        self.actor.accumulate(batches, loss, [])
        return merged(self.actor, use_gradients=True)

    @on_megatron
    def weights(self) -> dict[str, torch.Tensor] | None:
        """Full weights by Hugging Face name (first TP rank of each stage)."""
        return merged(self.actor, use_gradients=False)


def merged(model: MegatronModel, use_gradients: bool) -> dict[str, torch.Tensor] | None:
    """Full weights or gradients by Hugging Face name (first TP rank of each stage)."""
    found: dict[str, torch.Tensor] = {}
    for mapped in mapped_parameters(model.chunks, model.shape):
        saved = mapped.parameter.data
        if use_gradients:
            # In the parameter's precision: with another one, torch would forget the hooks that Megatron has on it.
            mapped.parameter.data = mapped.parameter.main_grad.to(mapped.parameter.dtype, copy=True)
        full = merge_parameter(mapped, model.shape, model.groups.tp)
        mapped.parameter.data = saved
        if full is not None and not mapped.is_tied_copy:
            found |= full
    return found or None


def start_probes(tmp_path: Path, world_size: int, device: str = "cpu") -> tuple[LocalCluster, Group]:
    """A cluster with one group of Probes; the caller closes the cluster."""
    cluster = local_cluster(tmp_path, use_gpus=device == "cuda", call_timeout=120)
    arguments = {"world_size": world_size, "meeting_point": str(tmp_path / "meet"), "device": device}
    specs = [
        WorkerSpec("tests.megatron_probe.Probe", {"rank": rank, **arguments}, devices=(rank,))
        for rank in range(world_size)
    ]
    group = cluster.launch("probe", specs)
    cluster.wait_started()
    return cluster, group
