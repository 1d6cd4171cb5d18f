"""This process as a rank: torch.distributed, and random generators."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.megatron.cuda_shim import cuda_means_cpu
from rlhfspec_mega.megatron.description import ParallelRanks
from rlhfspec_mega.megatron.rendezvous import Rendezvous


def join(rendezvous: Rendezvous, device: torch.device) -> None:
    """Initialize torch.distributed with the other ranks: gloo on CPU, NCCL on GPU.

    Raises RunError if they do not all arrive within the deadline.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # each worker sees only its own device
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            rank=rendezvous.rank,
            world_size=rendezvous.world_size,
            timeout=timedelta(seconds=rendezvous.call_timeout),
            **rendezvous.arguments(),
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise RunError(
            f"Rank {rendezvous.rank} did not meet the other {rendezvous.world_size - 1} ranks at "
            f"{rendezvous.init_method} within {rendezvous.call_timeout:g} s ({reason}): "
            "look into their logs, and whether every node reaches that address."
        ) from None


def set_deterministic(on: bool) -> None:
    """Refuse operations whose result depends on timing, or allow them, as torch.use_deterministic_algorithms does.

    That function also tells torch's compiler, and for this loads it, which takes a process more than a second; it is
    called only where Megatron compiles something.
    """
    if on and torch.cuda.is_available():
        torch.use_deterministic_algorithms(True)
    else:
        torch.set_deterministic_debug_mode("error" if on else "default")


def seed_megatron(seed: int, ranks: ParallelRanks) -> None:
    """Seed Megatron's CUDA generators; before models are built.

    The inference tracker's fork() is a null context: right while every dropout is 0.
    """
    with cuda_means_cpu():
        model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True, tp_rank=ranks.tp, ep_rank=0, etp_rank=0)


def leave() -> None:
    """Destroy all process groups; safe to call if there are none."""
    if dist.is_initialized():
        dist.destroy_process_group()
