"""The last fused pass of a run, from its timeline: which task ran when on each device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlhfspec_mega.config.compose import saved_config
from rlhfspec_mega.config.critic import critic_parallel
from rlhfspec_mega.config.output_dir import CONFIG_FILE
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.observe.gantt import Bar
from rlhfspec_mega.observe.timeline import TIMELINE_FILE, actor_lane, lane_of
from rlhfspec_mega.planning.pipeline.problem import Problem, opposed_pipelines
from rlhfspec_mega.planning.placement import ACTOR, CRITIC

MODELS = (ACTOR, CRITIC)


class Executed(NamedTuple):
    """A task that ran: start and end in seconds since the epoch; `update` numbers the passes of a rank's process."""

    update: int
    model: int
    backward: bool
    micro_batch: int
    start: float
    end: float


def executed_pass(run: Path) -> tuple[Problem, list[Bar]]:
    """The problem with the durations that tasks took in the first replica of the actor, and what ran.

    Raises UserError if the directory holds no run with a fused pass.
    """
    config = saved_config(run / CONFIG_FILE)
    stages = (config.actor.pipeline_parallel, critic_parallel(config)[1])
    by_rank = _tasks(run / TIMELINE_FILE)
    if not by_rank:
        raise UserError(f"{run} has no fused pass in its timeline: run it with placement.fuse=always.")
    apart = len(by_rank) // stages[0]  # ranks of one stage
    passes = [_last_pass(by_rank[stage * apart]) for stage in range(stages[0])]
    begin = min(one.start for tasks in passes for one in tasks)
    bars = [
        Bar(device, one.start - begin, one.end - begin, one.model, one.backward, one.micro_batch)
        for device, tasks in enumerate(passes)
        for one in tasks
    ]
    return _problem(stages, bars), bars


def _tasks(timeline: Path) -> dict[int, list[Executed]]:
    """Of each actor rank, the tasks of all fused passes, in order of time."""
    try:
        events: list[dict[str, Any]] = json.loads(timeline.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(f"{timeline} cannot be read: give the directory of a run that has ended.") from None
    names = {f"{name} {way}": (number, way == "backward") for number, name in enumerate(MODELS) for way in _WAYS}
    found: dict[int, list[Executed]] = {}
    for event in events:
        if event.get("ph") != "X" or event["name"] not in names or "update" not in event.get("args", {}):
            continue
        process, rank = lane_of(event["pid"], event["tid"])
        if process == actor_lane(0).process:
            start, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
            update, batch = (int(event["args"][name]) for name in ("update", "micro_batch"))
            found.setdefault(rank, []).append(Executed(update, *names[event["name"]], batch, start, end))
    return {rank: sorted(tasks, key=lambda one: one.start) for rank, tasks in sorted(found.items())}


_WAYS = ("forward", "backward")


def _last_pass(tasks: Sequence[Executed]) -> list[Executed]:
    return [one for one in tasks if one.update == tasks[-1].update]


def _problem(stages: tuple[int, int], bars: Sequence[Bar]) -> Problem:
    counts = [1 + max(bar.micro_batch for bar in bars if bar.model == model) for model in (0, 1)]
    replicas = [stages[0] // size for size in stages]
    shapes = [(many, size, count) for many, size, count in zip(replicas, stages, counts, strict=True)]
    times = [[np.full(shape, np.nan) for shape in shapes] for _ in _WAYS]
    for bar in bars:
        size = stages[bar.model]
        replica, place = divmod(bar.device, size)
        stage = place if bar.model == 0 else size - 1 - place
        times[bar.backward][bar.model][replica, stage, bar.micro_batch] = bar.end - bar.start
    if any(np.isnan(one).any() for way in times for one in way):
        raise UserError("The last fused pass is not whole in the timeline: it was full, or the run was killed.")
    forward, backward = times
    return opposed_pipelines(stages, forward, backward, [np.ones(shape) for shape in shapes])
