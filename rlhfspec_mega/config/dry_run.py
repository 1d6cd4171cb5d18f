"""The plan of a run, for a person or a program: what every device would hold, without starting anything."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rlhfspec_mega.config.advice import nearest_fit
from rlhfspec_mega.config.checks import check_composition
from rlhfspec_mega.config.device_plan import (
    PHASES,
    USABLE,
    DevicePlan,
    actor_stages,
    device_plans,
    fullest_device,
)
from rlhfspec_mega.config.hardware import device_type, host_memory
from rlhfspec_mega.config.machine import check_memory
from rlhfspec_mega.config.reach import weight_transport
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.sizes import Sizes, actor_layout, size_rows
from rlhfspec_mega.config.slurm import SlurmNodes, lacking, slurm_line, slurm_nodes
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.megatron_tensors import parameters_per_rank
from rlhfspec_mega.planning.memory import DTYPE_BYTES, GIB, checkpoint_bytes, saving_bytes
from rlhfspec_mega.planning.placement import ACTOR, REWARD
from rlhfspec_mega.simulate.step import forecast_run


def plan_of(config: RunConfig) -> dict[str, Any]:
    """The plan as plain data; bytes are exact for weights, gradients and optimizer, and estimates else.

    Its keys are described in docs/dry_run.md. A CPU's memory is shared by all devices of a node, so a device's capacity
    is its part.

    Raises:
        UserError: for a run that no machine could start.
    """
    shape, sizes = check_composition(config)
    plans = _with_capacity(config, device_plans(config, shape, sizes))
    fullest = fullest_device(plans)
    fits = _fits(config, shape, sizes)
    slurm = slurm_nodes()
    learners = [shape] if sizes.critic is None else [shape, sizes.critic.shape]
    sent = shape.parameters * DTYPE_BYTES[config.rollout.dtype or config.actor.dtype]
    return {
        "fits": fits,
        "bound_by": {
            "node": fullest.node,
            "index": fullest.index,
            "phase": fullest.fullest_phase,
            "bytes": fullest.most,
        },
        **_times(config, shape, sizes),
        "parameters": _parameters(config, shape, sizes),
        "devices": [asdict(plan) for plan in plans],
        "actor": [asdict(stage) for stage in actor_stages(config, shape, sizes)],
        "resharding": {
            "bytes": sent,
            "buckets_at_least": -(-sent // int(config.resharding.bucket_mib * 2**20)),
            "transport": weight_transport(config),
        },
        "checkpoint": {
            "bytes": sum(checkpoint_bytes(one, config.actor.dtype) for one in learners),
            "host_memory": sum(saving_bytes(one, config.actor.dtype) for one in learners if config.trainer.async_save),
        },
        "slurm": None if slurm is None else asdict(slurm) | {"lacking": lacking(slurm, config.cluster)},
        "suggestion": [] if fits else nearest_fit(config) or [],
    }


def dry_run(config: RunConfig) -> tuple[str, bool]:
    """The text that `dry_run=` prints, and whether the run fits: each device, and the Slurm nodes chosen for it.

    Raises UserError as `plan_of`.
    """
    plan = plan_of(config)
    slurm = plan["slurm"]
    fits = plan["fits"] and not (slurm and slurm["chosen"] and slurm["lacking"])
    if config.dry_run == "json":
        return json.dumps(plan), fits
    return "\n".join(_lines(config, plan)), fits


def _times(config: RunConfig, shape: ModelShape, sizes: Sizes) -> dict[str, Any]:
    """Predicted times of a step; None where nothing is known of the hardware."""
    forecast = forecast_run(config, shape, sizes) if sizes.engines else None
    if forecast is None:
        return {"step_seconds": None, "phase_seconds": {}, "phase_bound_by": {}, "time_source": None}
    return {
        "step_seconds": forecast.step_seconds,
        "phase_seconds": dict(forecast.seconds),
        "phase_bound_by": dict(forecast.bound_by),
        "time_source": dict(forecast.source),
    }


def _fits(config: RunConfig, shape: ModelShape, sizes: Sizes) -> bool:
    """As a real run decides it, also on a CPU, whose processes take memory of their own."""
    try:
        check_memory(config, shape, sizes)
    except UserError:
        return False
    return True


def _with_capacity(config: RunConfig, plans: list[DevicePlan]) -> list[DevicePlan]:
    if device_type(config.cluster) == "cuda":
        return plans
    part = host_memory() // config.cluster.devices_per_node
    return [DevicePlan(plan.node, plan.index, plan.ranks, plan.bytes, part) for plan in plans]


def _parameters(config: RunConfig, shape: ModelShape, sizes: Sizes) -> dict[str, list[int]]:
    layout = actor_layout(config, sizes.data_parallel)
    stages = parameters_per_rank(shape, layout)
    of_actor = [stages[rank * len(stages) // sizes.actor_ranks] for rank in range(sizes.actor_ranks)]
    found = {ACTOR: of_actor}
    for model in sizes.frozen_memory:
        place = sizes.placement.places[model]
        own = sizes.reward_shape if sizes.reward_shape and model == REWARD else shape
        if place.within == ACTOR:
            each = parameters_per_rank(own, layout)
            found[model] = [each[rank * len(each) // sizes.actor_ranks] for rank in range(sizes.actor_ranks)]
        else:
            alone = type(layout)(config.placement.reference_tensor_parallel)
            found[model] = parameters_per_rank(own, alone) * len(place.devices)
    return found


def _lines(config: RunConfig, plan: dict[str, Any]) -> Iterator[str]:
    _, sizes = check_composition(config)
    cluster, devices = config.cluster, plan["devices"]
    kind = cluster.gpu.name if device_type(cluster) == "cuda" else "CPU"
    name = config.model.path or config.model.name
    yield f"Plan of a run of model {name} on {cluster.nodes} x {cluster.devices_per_node} {kind}. Nothing was started."
    yield ""
    rows = size_rows(config, sizes)
    width = max(len(row[0]) for row in rows)
    yield from (f"  {what:{width}}  {value:>14}  {where}" for what, value, where in rows)
    yield ""
    bound = plan["bound_by"]
    fullest = next(one for one in devices if (one["node"], one["index"]) == (bound["node"], bound["index"]))
    capacity = fullest["capacity"]
    yield (
        f"GiB on the fullest device (node {bound['node']}, device {bound['index']}), of {capacity / GIB:.1f}"
        f"{f', of which {USABLE:.0%} can be used' if device_type(cluster) == 'cuda' else ''}:"
    )
    yield from _table(["", *PHASES], _phase_rows(fullest["bytes"]))
    yield ""
    yield "GiB on a rank of the actor, by pipeline stage:"
    kinds = ["weights", "gradients", "optimizer", "activations"]
    yield from _table(
        ["stage", *kinds],
        [[str(stage), *(_gib(one[kind]) for kind in kinds)] for stage, one in enumerate(plan["actor"])],
    )
    yield ""
    yield "Devices:"
    yield from _device_map(devices, sizes)
    yield ""
    if sizes.engines:
        sent = plan["resharding"]
        yield (
            f"Each weight update sends {sent['bytes'] / GIB:.1f} GiB in {sent['buckets_at_least']} or more buckets by "
            f"{sent['transport']}."
        )
        yield from _time_lines(plan)
    saved = plan["checkpoint"]
    kept = saved["host_memory"] / GIB
    where = f"; to write it beside training, the actor's nodes need {kept:.1f} GiB of host memory" if kept else ""
    yield f"A checkpoint takes {saved['bytes'] / GIB:.1f} GiB on disk{where}."
    yield _verdict(plan)
    if plan["slurm"] is not None:
        known = {name: value for name, value in plan["slurm"].items() if name != "lacking"}
        yield slurm_line(SlurmNodes(**known), cluster)


def _time_lines(plan: dict[str, Any]) -> Iterator[str]:
    source = plan["time_source"]
    if source is None:
        yield "Times are not predicted without a data sheet: add cluster.costs=FILE (python -m tools.calibrate RUN)."
        return
    if source["kind"] == "measured":
        made_from = f"from costs measured in {source['run']}"
    else:
        made_from = f"from a roofline of the {source['device']['name']}'s data sheet; nothing of it was measured"
    yield ""
    yield f"Estimated seconds of a step, {made_from}:"
    total, bound_by = plan["step_seconds"], plan["phase_bound_by"]
    for phase, seconds in plan["phase_seconds"].items():
        by = f"  {bound_by[phase]}" if phase in bound_by else ""
        yield f"  {phase:<10} {seconds:>9.2f} {seconds / total:>5.0%}{by}"
    yield f"  {'all':<10} {total:>9.2f}"
    yield ""


def _verdict(plan: dict[str, Any]) -> str:
    bound = plan["bound_by"]
    if plan["fits"]:
        return "It fits."
    where = f"{bound['bytes'] / GIB:.1f} GiB on node {bound['node']}, device {bound['index']} in phase {bound['phase']}"
    if plan["suggestion"]:
        return f"It does not fit ({where}): add {' '.join(plan['suggestion'])}."
    return f"It does not fit ({where}), and no parallel sizes make it fit: use more nodes or a smaller model."


def _phase_rows(loads: dict[str, dict[str, int]]) -> list[list[str]]:
    models = list(dict.fromkeys(model for phase in PHASES for model in loads[phase]))
    rows = [[model, *(_gib(loads[phase].get(model, 0)) for phase in PHASES)] for model in models]
    return [*rows, ["total", *(_gib(sum(loads[phase].values())) for phase in PHASES)]]


def _gib(count: int) -> str:
    return f"{count / GIB:.2f}" if count else "-"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        cells = [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join([f"  {row[0]:{widths[0]}}", *cells])


def _device_map(devices: Sequence[dict[str, Any]], sizes: Sizes) -> Iterator[str]:
    """A line for each group of neighbouring nodes whose devices hold the same models and bytes."""
    nodes = [list(group) for _, group in groupby(devices, key=lambda one: one["node"])]

    def alike(node: list[dict[str, Any]]) -> list[Any]:
        return [(sorted(one["ranks"]), one["bytes"]) for one in node]

    for _, group in groupby(nodes, key=alike):
        same = list(group)
        first, last = same[0][0]["node"], same[-1][0]["node"]
        held: dict[str, list[int]] = {}
        for node in same:
            for one in node:
                for model, rank in one["ranks"].items():
                    held.setdefault(model, []).append(rank)
        counts = {model: len(sizes.placement.devices(model)) for model in held}
        parts = [f"{model} {_range(sorted(set(ranks)))} of {counts[model]}" for model, ranks in held.items()]
        most = max(sum(loads.values()) for node in same for one in node for loads in one["bytes"].values())
        yield f"  node {_range([first, last])}: {'; '.join(parts) or 'nothing'}; at most {most / GIB:.1f} GiB"


def _range(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}" if numbers[0] == numbers[-1] else f"{numbers[0]}-{numbers[-1]}"
