"""What to type where conf/presets.yaml has no line for a model and its hardware: the smallest sizes that fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import product
from typing import Any

from rlhfspec_mega.config.compose import NoPresetError, load_config, options_read
from rlhfspec_mega.config.hardware import device_type
from rlhfspec_mega.config.model_shape import model_shape
from rlhfspec_mega.config.names import as_written, group_options
from rlhfspec_mega.config.nearest import fits_with, nearest, parallel_sizes
from rlhfspec_mega.config.presets import LISTS, presets
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.errors import UserError

PARALLEL = LISTS["parallel"]
LR, SHARE = 1e-6, 0.3  # as the table has them for large models


def with_advice(error: NoPresetError) -> UserError:
    """The refusal with the values to type.

    For this hardware, or for the smallest cluster in conf/ on which the model fits.
    """
    sentence = str(error).rsplit(": set ", 1)[0]
    here, words = _advice(error)
    if here:
        return UserError(f"{sentence}: add {' '.join(words)}.")
    remedy = f"use {' '.join(words)}" if words else "choose a smaller model"
    return UserError(f"{sentence}, and no parallel sizes make it fit: {remedy}.")


def unplanned(error: NoPresetError) -> dict[str, Any]:
    """What dry_run=json prints of a run that has no sizes yet: that it does not fit, and what to add."""
    _, words = _advice(error)
    return {"fits": False, "bound_by": None, "step_seconds": None, "devices": [], "suggestion": words}


def _advice(error: NoPresetError) -> tuple[bool, list[str]]:
    """Whether this hardware can hold the model, and the options to type; [] if no cluster can."""
    found = _fitting(error.config, error.unset)
    if found is not None:
        return True, found
    for cluster, config in _larger(error.config):
        for search in (_as_the_table_says, _fitting):
            found = search(config, error.unset)
            if found is not None:
                return False, [*cluster, *found]
    return False, []


def nearest_fit(config: RunConfig) -> list[str] | None:
    """Options to add to a run that does not fit, as one types them, if need be with a larger cluster.

    None if nothing was found.
    """
    found = nearest(config)
    if found is not None:
        return found
    for cluster, one in _larger(config):
        found = nearest(one)
        if found is not None:
            return [*cluster, *found]
    return None


def _larger(config: RunConfig) -> Iterator[tuple[list[str], RunConfig]]:
    """The run on each of conf/'s clusters of GPUs, smallest first, with the words to type for it.

    The run's kind of GPU and its options of the cluster are kept, as they are if one adds a word to the command.
    """
    given = config.cluster
    clusters = {name: load_config([f"cluster={name}"]).cluster for name in group_options()["cluster"]}
    as_named = any(
        (one.nodes, one.devices_per_node) == (given.nodes, given.devices_per_node) for one in clusters.values()
    )
    for name, cluster in sorted(clusters.items(), key=lambda one: one[1].nodes * one[1].devices_per_node):
        if cluster.device != "cuda":
            continue
        other = deepcopy(config)
        other.cluster = cluster
        if given.device == "cuda":
            cluster.gpu = given.gpu
        sizes = [f"cluster.nodes={cluster.nodes}", f"cluster.devices_per_node={cluster.devices_per_node}"]
        yield [f"cluster={name}", *([] if as_named else sizes)], other


def _as_the_table_says(config: RunConfig, unset: Sequence[str]) -> list[str] | None:
    """The options to type besides the cluster if conf/presets.yaml sets what the user left unset.

    None if the table has no line for this model and cluster, or the model does not fit with its values.
    """
    found = presets(model_shape(config.model).parameters, config.cluster)
    if not set(unset) <= set(found):
        return None
    values = {key: found[key][0] for key in unset}
    if config.placement.reference == "auto":
        values["placement.reference"] = found["placement.reference"][0]
    return next((words for engine, words in _engines(config) if _fits(config, engine, values)), None)


def _fitting(config: RunConfig, unset: Sequence[str]) -> list[str] | None:
    """The unset options as one types them, with the smallest parallel sizes that fit; None if none do."""
    config = deepcopy(config)
    references: list[dict[str, Any]] = [{}, {"placement.reference": "actor"}]
    for reference, (engine, words), (tensor, pipeline) in product(references, _engines(config), parallel_sizes(config)):
        values = {key: value for key, value in _values(config, tensor, pipeline).items() if key in unset} | reference
        if _fits(config, engine, values):
            config.rollout.engine = engine
            return [*words, *(as_written(key, values[key]) for key in options_read(config, list(values)))]
    return None


def _engines(config: RunConfig) -> list[tuple[str, list[str]]]:
    """Engines to try, each with the words to type for it: SGLang's may span several GPUs, the embedded ones may not."""
    given = (config.rollout.engine, list[str]())
    if device_type(config.cluster) == "cpu" or config.rollout.engine == "sglang":
        return [given]
    return [given, ("sglang", ["rollout=sglang"])]


def _values(config: RunConfig, tensor: int, pipeline: int) -> dict[str, Any]:
    """Values by option; engines and the reference get the actor's tensor-parallel size."""
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


def _fits(config: RunConfig, engine: str, values: dict[str, Any]) -> bool:
    """Whether the run with this engine and these values has sizes that divide and fits into memory."""
    return fits_with(config, {"rollout.engine": engine, **values})
