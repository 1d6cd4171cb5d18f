"""A worker for tests: an Actor rank that also reports gradients and weights under their Hugging Face names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlhfspec_mega.actor.actor import Actor, on_megatron
from rlhfspec_mega.actor.initialize import shutdown
from rlhfspec_mega.actor.rendezvous import Rendezvous
from rlhfspec_mega.actor.step import accumulate_gradients
from rlhfspec_mega.actor.weights import mapped_parameters, merge_parameter
from rlhfspec_mega.algorithm.microbatch import MicroBatch
from rlhfspec_mega.cluster.interface import WorkerSpec
from rlhfspec_mega.cluster.local import LocalCluster
from rlhfspec_mega.cluster.supervised import Group
from rlhfspec_mega.config.schema import ActorConfig
from rlhfspec_mega.models.hf_directory import read_shape
from tests.clusters import local_cluster


def negative_logprob(
    logprobs: torch.Tensor, entropy: torch.Tensor, batch: MicroBatch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Supervised loss: what transformers' Llama can be asked for too."""
    return -logprobs, {"entropy": entropy}


class Probe:
    """Rebuilds an Actor per model, so that one set of processes serves many cases of the same parallel sizes."""

    def __init__(self, rank: int, world_size: int, meeting_point: str, device: str = "cpu") -> None:
        torch.set_num_threads(1)
        self.rank, self.world_size, self.meeting_point, self.device = rank, world_size, meeting_point, device
        self.builds = 0

    def build(
        self, config: ActorConfig, model: Path, temperature: float = 1.0, load: bool = True
    ) -> tuple[int, int, int]:
        shutdown()
        self.builds += 1
        rendezvous = Rendezvous(f"file://{self.meeting_point}.{self.builds}", self.rank, self.world_size, 60)
        self.actor = Actor(
            read_shape(model),
            config,
            rendezvous,
            device=self.device,
            seed=0,
            temperature=temperature,
            total_updates=100,
        )
        if load:
            self.actor.load_weights(model)
        return self.actor.ranks.tp, self.actor.ranks.pp, self.actor.ranks.dp

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.actor, method)(*args)

    def update(
        self, shards: list[list[MicroBatch]], loss: Any = negative_logprob, metrics: tuple[str, ...] = ("entropy",)
    ) -> dict[str, float]:
        return self.actor.update(shards[self.actor.ranks.dp], loss, metrics)

    def betas(self) -> list[tuple[float, float]]:
        return sorted({tuple(group["betas"]) for group in self.actor.optimizer.param_groups})

    @on_megatron
    def gradients(self, batches: list[MicroBatch]) -> dict[str, torch.Tensor] | None:
        """Averaged gradients by Hugging Face name (first TP rank of each stage); the weights are left as they were."""
        accumulate_gradients(self.actor.chunks, batches, self.actor._logits, negative_logprob)
        return self._merged(use_gradients=True)

    @on_megatron
    def weights(self) -> dict[str, torch.Tensor] | None:
        """Full weights by Hugging Face name (first TP rank of each stage)."""
        return self._merged(use_gradients=False)

    def _merged(self, use_gradients: bool) -> dict[str, torch.Tensor] | None:
        found: dict[str, torch.Tensor] = {}
        for mapped in mapped_parameters(self.actor.chunks, self.actor.shape):
            saved = mapped.parameter.data
            if use_gradients:
                mapped.parameter.data = mapped.parameter.main_grad.clone()
            merged = merge_parameter(mapped, self.actor.shape)
            mapped.parameter.data = saved
            if merged is not None and not mapped.is_tied_copy:
                found |= merged
        return found or None


def start_probes(tmp_path: Path, world_size: int, device: str = "cpu") -> tuple[LocalCluster, Group]:
    """A cluster with one group of Probes; the caller closes the cluster."""
    cluster = local_cluster(tmp_path, use_gpus=device == "cuda", deadline_seconds=120)
    arguments = {"world_size": world_size, "meeting_point": str(tmp_path / "meet"), "device": device}
    specs = [
        WorkerSpec("tests.megatron_probe.Probe", {"rank": rank, **arguments}, devices=(rank,))
        for rank in range(world_size)
    ]
    group = cluster.launch("probe", specs)
    cluster.wait_started()
    return cluster, group
