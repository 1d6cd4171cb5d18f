"""Random generators of one rank: seeded at the start, saved with a checkpoint, restored under the same layout."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from rlhfspec_mega.megatron.description import ParallelRanks
from rlhfspec_mega.megatron.groups import ranks_in


def seed_generators(seed: int, ranks: ParallelRanks) -> None:
    """Seed Python, numpy and torch on the CPU, another seed per pipeline stage as in Megatron's training.

    The CUDA generators are seeded by Megatron's `model_parallel_cuda_manual_seed`.
    """
    own = (seed + 100 * ranks.pp) % 2**32
    random.seed(own)
    np.random.seed(own)
    # Not torch.manual_seed, which would overwrite the CUDA generators.
    torch.default_generator.manual_seed(own)


def grid(groups: ProcessGroupCollection) -> dict[str, int]:
    """The layout under which a saved random state may be restored."""
    sizes = {"tp": groups.tp.size(), "pp": groups.pp.size(), "dp": groups.dp.size()}
    stages = dist.get_process_group_ranks(groups.pp)
    return sizes if stages == sorted(stages) else sizes | {"opposed": 1}


def sharded_random_state(groups: ProcessGroupCollection) -> ShardedObject:
    """This rank's state as one cell of the PP x TP x DP grid of a distributed checkpoint."""
    sizes, ranks = grid(groups), ranks_in(groups)
    shape, offset = (sizes["pp"], sizes["tp"], sizes["dp"]), (ranks.pp, ranks.tp, ranks.dp)
    return ShardedObject("random_state", random_state(), shape, offset, replica_id=0)


def random_state() -> dict[str, Any]:
    """The state of every generator of this process, in plain types and tensors."""
    name, keys, *rest = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tolist(), *rest),
        "torch": torch.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Set every generator as `random_state` found it. A state saved without CUDA leaves CUDA's generator alone."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
