"""Schedules and durations as text and JSON, as tools.pipeline prints and reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.planning.pipeline.problem import Doubles, Problem
from rlhfspec_mega.planning.pipeline.schedule import Schedule, Task

LARGEST = 1e9  # seconds of a task that are accepted: sums of many stay numbers


def label(problem: Problem, task: Task) -> str:
    """A task such as "0F3": model, F or B, micro-batch."""
    return f"{problem.pipelines[task.pipeline].model}{'B' if task.backward else 'F'}{task.micro_batch}"


def labels(problem: Problem, schedule: Schedule) -> list[list[str]]:
    """The labels of each device's tasks, in order."""
    return [[label(problem, task) for task in order] for order in schedule.orders]


def read_durations(
    path: Path, stages: Sequence[int], micro_batches: Sequence[int] | None
) -> tuple[list[Doubles], list[Doubles]]:
    """Forward and backward seconds of each model, [replicas, stages, micro-batches of a replica].

    The file holds a list with an object for each model: {"forward": [[...]], "backward": [[...]]}, a list of
    micro-batches for each stage. Those of the second model are one replica's, and all replicas have the same, unless
    there are as many as `micro_batches` says of all replicas together: then they follow each other.

    Args:
        micro_batches: of each model, those of one replica; None: as many as the file has.

    Raises UserError.
    """
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON that can be read: {error}.") from None
    if not isinstance(given, list) or len(given) != len(stages):
        raise UserError(f"{path} must hold a list of {len(stages)} objects, one for each model of --p.")
    found: tuple[list[Doubles], list[Doubles]] = ([], [])
    for model, (one, size) in enumerate(zip(given, stages, strict=True)):
        where = f"{path}, model {model}"
        ways = [_matrix(one, way, size, where) for way in ("forward", "backward")]
        columns, replicas = ways[0].shape[1], stages[0] // size
        wanted = columns if micro_batches is None else micro_batches[model]
        if ways[1].shape[1] != columns or columns not in (wanted, wanted * replicas):
            raise UserError(
                f"{where} has {columns} forwards and {ways[1].shape[1]} backwards of a stage: there must be {wanted}"
                + (f", or {wanted * replicas} of all replicas." if replicas > 1 else ".")
            )
        for way, times in zip(found, ways, strict=True):
            way.append(np.stack([times] * replicas if columns == wanted else np.split(times, replicas, axis=1)))
    return found


def _matrix(given: Any, way: str, stages: int, where: str) -> Doubles:
    """[stages, micro-batches] of positive seconds."""
    rows = given.get(way) if isinstance(given, dict) else None
    numbers = [one for row in rows for one in row] if isinstance(rows, list) and all(map(_is_list, rows)) else []
    if not numbers or len({len(row) for row in rows or []}) > 1 or not all(map(_is_duration, numbers)):
        raise UserError(
            f'{where}: "{way}" must hold a list of positive numbers (up to {LARGEST:g}) for each stage, all of one '
            "length."
        )
    found = np.array(rows, np.float64)
    if len(found) != stages:
        raise UserError(f'{where}: "{way}" has {len(found)} stages, and --p says {stages}.')
    return found


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_duration(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LARGEST
