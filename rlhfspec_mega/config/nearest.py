"""The settings nearest to a run's own with which it fits into memory, found by a search over what decides memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from typing import Any

from rlhfspec_mega.config.compose import options_read
from rlhfspec_mega.config.fusion import fuses
from rlhfspec_mega.config.hardware import device_type
from rlhfspec_mega.config.machine import check_memory
from rlhfspec_mega.config.model_shape import model_shape
from rlhfspec_mega.config.names import as_written
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.shape_checks import check_lengths, check_parallel, check_shape
from rlhfspec_mega.config.sizes import derive_sizes
from rlhfspec_mega.errors import UserError

MOST_TRIES = 1500  # some 10 s; a search that gets here tries a larger cluster
_SHARES = (0.5, 0.4, 0.3, 0.25, 0.2)
Values = dict[str, Any]  # by option


@dataclass(frozen=True)
class _Knob:
    """Settings of options that go together, from those of the run ({}) to ever less memory.

    Attributes:
        price: of the first step away from the run's settings; each further step costs a third of 1.
    """

    settings: list[Values]
    price: int


def _knob(price: int, settings: Iterable[Values]) -> _Knob:
    return _Knob([{}, *settings], price)


def nearest(config: RunConfig) -> list[str] | None:
    """The options to add to a run so that it fits on its cluster, as one types them; [] if it fits as it is.

    Cheap changes come first: recomputation, smaller micro-batches, less KV; then the parallel sizes of engines, of the
    reference and of the actor; then another place for the reference, and SGLang, whose engines may span GPUs.
    None if nothing fits.
    """
    layouts, others = _layouts(config), _knobs(config)
    frugal = [knob.settings[-1] for knob in others]
    layouts = [{}, *(one for one in layouts if _fits(config, [one, *frugal]))]
    if len(layouts) == 1 and not _fits(config, frugal):
        return None
    found = _cheapest(config, [*others, _Knob(layouts, 3)])
    return None if found is None else _as_typed(config, found)


def fits_with(config: RunConfig, values: Values) -> bool:
    """Whether the run with these values has sizes that divide and fits into memory."""
    tried = _changed(config, values)
    try:
        shape = model_shape(tried.model)
        check_shape(tried, shape)
        check_parallel(tried, shape)
        check_lengths(tried, shape)
        check_memory(tried, shape, derive_sizes(tried, shape))
    except UserError:
        return False
    return True


def parallel_sizes(config: RunConfig) -> list[tuple[int, int]]:
    """Tensor- and pipeline-parallel sizes that a cluster allows, by the number of ranks of a replica, fewer stages
    first; tensor parallelism stays within a node."""
    cluster = config.cluster
    tensor = [n for n in range(1, cluster.devices_per_node + 1) if cluster.devices_per_node % n == 0]
    stages = [n for n in range(1, cluster.nodes + 1) if cluster.nodes % n == 0]
    return sorted(product(tensor, stages), key=lambda one: (one[0] * one[1], one[1]))


def _cheapest(config: RunConfig, knobs: Sequence[_Knob]) -> Values | None:
    """The combination of least price that fits (uniform-cost search); None after MOST_TRIES."""
    start = (0,) * len(knobs)
    queue, seen = [(0, start)], {start}
    for _ in range(MOST_TRIES):
        if not queue:
            return None
        price, places = heapq.heappop(queue)
        chosen = [knob.settings[place] for knob, place in zip(knobs, places, strict=True)]
        if _fits(config, chosen):
            return _joined(chosen)
        for index, knob in enumerate(knobs):
            following = (*places[:index], places[index] + 1, *places[index + 1 :])
            if following[index] < len(knob.settings) and following not in seen:
                seen.add(following)
                heapq.heappush(queue, (price + (1 if places[index] else 3 * knob.price), following))
    return None


def _knobs(config: RunConfig) -> list[_Knob]:
    """All but the actor's parallel sizes."""
    rollout, each = config.rollout, config.cluster.devices_per_node
    reference = config.placement.reference_tensor_parallel
    wider = [n for n in range(1, each + 1) if each % n == 0]
    found = [
        _knob(1, [] if config.actor.recompute else [{"actor.recompute": True}]),
        _knob(1, [{"placement.fuse": "off"}] if fuses(config) else []),
        _knob(1, ({"trainer.max_tokens_per_microbatch": tokens} for tokens in _smaller_batches(config))),
    ]
    if rollout.engine == "sglang":
        share = rollout.sglang.mem_fraction_static or 1.0
        found.append(_knob(1, ({"rollout.sglang.mem_fraction_static": one} for one in _SHARES if one < share)))
        spans = [n for n in wider if n > rollout.sglang.tensor_parallel]
        found.append(_knob(2, ({"rollout.sglang.tensor_parallel": n} for n in spans)))
    else:
        slots = _halves(rollout.max_running_requests)
        found.append(_knob(1, ({"rollout.max_running_requests": n} for n in slots)))
        if device_type(config.cluster) == "cuda":
            chosen = {"rollout.engine": "sglang", "rollout.sglang.mem_fraction_static": 0.3}
            found.append(_knob(3, (chosen | {"rollout.sglang.tensor_parallel": n} for n in wider)))
    if config.algorithm.kl_coef > 0 and config.placement.reference != "actor":
        spread: list[Values] = [{"placement.reference_tensor_parallel": n} for n in wider if n > reference]
        found.append(_knob(2, [*spread, {"placement.reference": "actor"}]))
    if config.placement.mode == "separate":
        engines = derive_sizes(config, model_shape(config.model)).engines
        found.append(_knob(2, ({"rollout.engines": n} for n in _halves(engines))))
    return found


def _layouts(config: RunConfig) -> list[Values]:
    """Other parallel sizes of the actor, the nearest first."""
    actor = config.actor
    given = (actor.tensor_parallel, actor.pipeline_parallel)
    ranks = given[0] * given[1]

    def distance(one: tuple[int, int]) -> tuple[float, int]:
        more = one[0] * one[1] / ranks
        return (more if more >= 1 else 1 / more, one[1])

    found = []
    for tensor, stages in sorted(parallel_sizes(config), key=distance):
        if (tensor, stages) != given:
            values: Values = {"actor.tensor_parallel": tensor, "actor.pipeline_parallel": stages}
            found.append(values | {"actor.sequence_parallel": tensor > 1})
    return found


def _smaller_batches(config: RunConfig) -> Iterator[int]:
    """Halves of the micro-batch's tokens, down to the longest sequence."""
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    return (tokens for tokens in _halves(config.trainer.max_tokens_per_microbatch) if tokens >= longest)


def _halves(number: int) -> Iterator[int]:
    while number > 1:
        number = -(-number // 2)
        yield number


def _fits(config: RunConfig, chosen: Sequence[Values]) -> bool:
    return fits_with(config, _joined(chosen))


def _joined(chosen: Sequence[Values]) -> Values:
    return {key: value for values in chosen for key, value in values.items()}


def _changed(config: RunConfig, values: Values) -> RunConfig:
    changed = deepcopy(config)
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        setattr(attrgetter(section)(changed), name, value)
    return changed


def _as_typed(config: RunConfig, values: Values) -> list[str]:
    """The options to type for these values: those that differ from the run's own, a change of engine first."""
    changed = _changed(config, values)
    keys = [key for key in options_read(changed, list(values)) if attrgetter(key)(config) != values[key]]
    keys.sort(key=lambda key: key != "rollout.engine")
    return [as_written(key, values[key]) for key in keys]
