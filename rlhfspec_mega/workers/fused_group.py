"""The driver's view of two models that train in one pass: mini-batch in, both models' metrics out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlhfspec_mega.cluster.interface import WorkerGroup
from rlhfspec_mega.planning.pipeline.fusion import FusedPlan, FusionPlanner
from rlhfspec_mega.planning.pipeline.rank_task import TaskTime
from rlhfspec_mega.rl.experience import Experience, Floats
from rlhfspec_mega.rl.microbatch import Objective, Shard
from rlhfspec_mega.workers.model_group import ModelGroup


class FusedGroup:
    """Two models on the same ranks, whose pipelines run in opposite directions.

    Args:
        first, second: the model with more pipeline stages, or as many, comes first.
    """

    def __init__(self, workers: WorkerGroup, first: ModelGroup, second: ModelGroup, planner: FusionPlanner) -> None:
        self._workers, self._planner = workers, planner
        self._models = {one.description.name: one for one in (first, second)}
        self._first, self._warm = first, False

    def accumulate(
        self, samples: Experience, objectives: Mapping[str, Objective]
    ) -> dict[str, tuple[dict[str, float], Floats | None, float]] | None:
        """Accumulate both models' gradients of a mini-batch; by model its metrics, columns and mean entropy.

        None, and nothing is computed, if one model after the other is predicted to be about as fast.
        """
        shards = {name: one.shards(samples) for name, one in self._models.items()}
        tokens = {name: [shard.micro_batch_positions for shard in parts] for name, parts in shards.items()}
        plan = self._planner.plan(tokens)
        if plan is None:
            return None
        answers = self._workers.scatter("accumulate_fused", self._arguments(shards, objectives, plan), "update")
        if self._warm:
            self._learn(tokens, [times for _, times in answers])
        self._warm = True  # the first pass includes first allocations
        return {
            name: one.gathered(samples, shards[name], [found[name] for found, _ in answers])
            for name, one in self._models.items()
        }

    def _arguments(
        self, shards: Mapping[str, list[Shard]], objectives: Mapping[str, Objective], plan: FusedPlan
    ) -> list[tuple[Any, ...]]:
        """Of each rank, its arguments."""
        shared = {name: [self._workers.share(shard) for shard in parts] for name, parts in shards.items()}
        wanted = {name: objectives[name] for name in self._models}
        return [
            (
                plan.tasks[place.dp][place.pp],
                wanted,
                *(shared[name][one.positions[rank].dp] for name, one in self._models.items()),
            )
            for rank, place in enumerate(self._first.positions)
        ]

    def _learn(self, tokens: Mapping[str, list[list[int]]], times: list[list[TaskTime]]) -> None:
        """Learn the costs of tasks from the first tensor-parallel ranks."""
        for rank, of_rank in enumerate(times):
            for name, one in self._models.items():
                place = one.positions[rank]
                for backward in (False, True) if place.tp == 0 else ():
                    done = [time for time in of_rank if time.task.model == name and time.task.backward == backward]
                    counts = [tokens[name][place.dp][time.task.micro_batch] for time in done]
                    seconds = [time.seconds for time in done]
                    self._planner.costs.learn(name, place.pp, backward, np.array(counts, float), np.array(seconds))
