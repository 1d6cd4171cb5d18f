"""What to type where conf/presets.yaml has no line for a model and its hardware: the smallest sizes that fit."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from itertools import product
from operator import attrgetter
from typing import Any

from rlhfspec_mega.config.compose import NoPresetError, load_config
from rlhfspec_mega.config.hardware import device_type
from rlhfspec_mega.config.machine import check_memory
from rlhfspec_mega.config.model_shape import model_shape
from rlhfspec_mega.config.names import as_written, group_options
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.shape_checks import check_lengths, check_parallel, check_shape
from rlhfspec_mega.config.sizes import derive_sizes
from rlhfspec_mega.errors import UserError

LR, SHARE = 1e-6, 0.3  # as the table has them for large models


def with_advice(error: NoPresetError) -> UserError:
    """The refusal with values to type: for this hardware, or else for the smallest one in conf/ on which it fits."""
    sentence = str(error).rsplit(": set ", 1)[0]
    if found := _fitting(error.config, error.unset):
        return UserError(f"{sentence}: add {' '.join(found)}.")
    for name, config in _larger(error.config):
        if found := _fitting(config, error.unset):
            return UserError(f"{sentence}, and no parallel sizes make it fit: use cluster={name} {' '.join(found)}.")
    return UserError(f"{sentence}, and no parallel sizes make it fit: choose a smaller model.")


def _larger(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """The run on the clusters of GPUs in conf/, smallest first."""
    clusters = {name: load_config([f"cluster={name}"]).cluster for name in group_options()["cluster"]}
    for name, cluster in sorted(clusters.items(), key=lambda one: one[1].nodes * one[1].devices_per_node):
        if cluster.device == "cuda":
            other = deepcopy(config)
            other.cluster = cluster
            yield name, other


def _fitting(config: RunConfig, unset: tuple[str, ...]) -> list[str]:
    """The unset options with the smallest parallel sizes that fit, as one writes them; empty if none do."""
    cluster = config.cluster
    sizes = [n for n in range(1, cluster.devices_per_node + 1) if cluster.devices_per_node % n == 0]
    stages = [n for n in range(1, cluster.nodes + 1) if cluster.nodes % n == 0]
    layouts = sorted(((t, p) for t in sizes for p in stages), key=lambda one: (one[0] * one[1], one[1]))
    # SGLang's engines may span GPUs, ours may not.
    engines = ["torch"] if device_type(cluster) == "cpu" else list(dict.fromkeys((config.rollout.engine, "sglang")))
    for engine, (tensor, pipeline) in product(engines, layouts):
        wanted = _values(config, tensor, pipeline)
        tried = deepcopy(config)
        tried.rollout.engine = engine
        for key in unset:
            section, _, name = key.rpartition(".")
            setattr(attrgetter(section)(tried), name, wanted[key])
        if _fits(tried):
            said = [] if engine == config.rollout.engine else [f"rollout={engine}"]
            return [
                *said,
                *(as_written(key, wanted[key]) for key in unset if engine == "sglang" or "sglang" not in key),
            ]
    return []


def _values(config: RunConfig, tensor: int, pipeline: int) -> dict[str, Any]:
    """By option; sizes of engines and of the reference are those of the actor's tensor parallelism."""
    return {
        "actor.tensor_parallel": tensor,
        "actor.pipeline_parallel": pipeline,
        "actor.sequence_parallel": tensor > 1,
        "actor.recompute": True,
        "actor.dtype": "float32" if device_type(config.cluster) == "cpu" else "bfloat16",
        "actor.optimizer.lr": LR,
        "rollout.sglang.tensor_parallel": tensor,
        "rollout.sglang.mem_fraction_static": SHARE,
        "placement.reference_tensor_parallel": tensor,
    }


def _fits(config: RunConfig) -> bool:
    try:
        shape = model_shape(config.model)
        check_shape(config, shape)
        check_parallel(config, shape)
        check_lengths(config, shape)
        check_memory(config, shape, derive_sizes(config, shape))
    except UserError:
        return False
    return True
