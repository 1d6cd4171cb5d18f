"""Process groups of one actor rank: torch.distributed, then Megatron's model-parallel groups."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from rlhfspec_mega.actor.cuda_shim import cuda_means_cpu
from rlhfspec_mega.actor.rendezvous import ParallelRanks, Rendezvous
from rlhfspec_mega.config.schema import ActorConfig
from rlhfspec_mega.errors import RunError


def initialize(rendezvous: Rendezvous, config: ActorConfig, device: torch.device, seed: int) -> ParallelRanks:
    """Join the actor group: gloo on CPU, NCCL on GPU.

    Raises RunError when the other ranks do not come within the deadline.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # the launcher shows each worker its own device only
    _meet(rendezvous, "nccl" if device.type == "cuda" else "gloo")
    with cuda_means_cpu():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_parallel,
            pipeline_model_parallel_size=config.pipeline_parallel,
            virtual_pipeline_model_parallel_size=config.virtual_pipeline if config.virtual_pipeline > 1 else None,
            create_gloo_process_groups=True,
            distributed_timeout_minutes=max(1, round(rendezvous.deadline_seconds / 60)),
        )
        # The inference tracker's fork() is a null context: right while every dropout is 0.
        model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True)
    return ParallelRanks(
        tp=parallel_state.get_tensor_model_parallel_rank(),
        pp=parallel_state.get_pipeline_model_parallel_rank(),
        dp=parallel_state.get_data_parallel_rank(),
    )


def _meet(rendezvous: Rendezvous, backend: str) -> None:
    try:
        dist.init_process_group(
            backend,
            rank=rendezvous.rank,
            world_size=rendezvous.world_size,
            timeout=timedelta(seconds=rendezvous.deadline_seconds),
            **rendezvous.arguments(),
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise RunError(
            f"Actor rank {rendezvous.rank} did not meet the other {rendezvous.world_size - 1} ranks at "
            f"{rendezvous.init_method} within {rendezvous.deadline_seconds:g} s ({reason}): "
            "look into their logs, and whether every node reaches that address."
        ) from None


def shutdown() -> None:
    """Leave all groups; safe to call when none was joined."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
