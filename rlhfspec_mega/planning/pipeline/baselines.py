"""What a fused schedule is compared with: the models one after the other under Megatron's 1F1B."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.planning.pipeline.problem import Doubles, Pipeline, Problem
from rlhfspec_mega.planning.pipeline.schedule import Schedule, Task, timed


def one_f_one_b(stage: int, stages: int, batches: Sequence[int], live: int | None = None) -> list[tuple[int, bool]]:
    """Megatron's 1F1B on one stage: (micro-batch, backward) in order.

    Args:
        live: most micro-batches between forward and backward on a stage, instead of stages - stage.
    """
    warm_up = min(stages - stage - 1, len(batches), (live or stages) - 1)
    found = [(batch, False) for batch in batches[:warm_up]]
    for number, batch in enumerate(batches[warm_up:]):
        found += [(batch, False), (batches[number], True)]
    return found + [(batch, True) for batch in batches[len(batches) - warm_up :]]


def one_after_the_other(
    problem: Problem, micro_batches: Sequence[Sequence[int]] | None = None, live: int | None = None
) -> list[list[Task]]:
    """Orders of tasks in which each device computes one model after the other, each under 1F1B.

    Args:
        micro_batches: of each pipeline, in order; by default those of short_ones_outside.
        live: see one_f_one_b.
    """
    wanted = micro_batches or [short_ones_outside(one) for one in problem.pipelines]
    found: list[list[Task]] = [[] for _ in range(problem.devices)]
    for model in problem.models:
        for index, one in enumerate(problem.pipelines):
            for stage, device in enumerate(one.devices if one.model == model else ()):
                steps = one_f_one_b(stage, one.stages, wanted[index], live)
                found[device] += [Task(index, stage, batch, backward) for batch, backward in steps]
    return found


def serial(problem: Problem, micro_batches: Sequence[Sequence[int]] | None = None) -> list[Schedule]:
    """Each model alone under 1F1B. Their makespans add up: one begins when the one before has ended everywhere."""
    wanted = micro_batches or [short_ones_outside(one) for one in problem.pipelines]
    found = []
    for model in problem.models:
        own = [order for order, one in zip(wanted, problem.pipelines, strict=True) if one.model == model]
        alone = problem.of_model(model)
        found.append(timed(alone, one_after_the_other(alone, own)))
    return found


def in_turn(problem: Problem) -> Schedule:
    """One model after the other on each device, with as many live micro-batches as the memory allows.

    Raises UserError if a single micro-batch exceeds the memory.
    """
    for live in range(max(one.stages for one in problem.pipelines), 0, -1):
        found = timed(problem, one_after_the_other(problem, live=live))
        if problem.fits(found.peaks):
            return found
    raise UserError(
        f"A micro-batch keeps up to {found.peak_memory:g} bytes of activations on a stage, and "
        f"{problem.capacities.min():g} are allowed: allow more, or make micro-batches smaller."
    )


def short_ones_outside(pipeline: Pipeline) -> list[int]:
    """Micro-batches by rising, then by falling duration."""
    return rising_then_falling((pipeline.forward + pipeline.backward).sum(axis=0))


def rising_then_falling(lengths: Sequence[float] | Doubles) -> list[int]:
    """Indices of micro-batches in an order that suits 1F1B: the pipeline fills and drains with short ones."""
    if not np.ptp(lengths):
        return list(range(len(lengths)))
    rising = np.argsort(lengths, kind="stable").tolist()
    return rising[::2] + rising[1::2][::-1]
