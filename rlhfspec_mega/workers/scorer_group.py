"""The driver's view of the frozen models whose replicas lie on the engines' devices."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rlhfspec_mega.cluster.interface import Call, Cluster, WorkerGroup
from rlhfspec_mega.cluster.liveness import WorkerState
from rlhfspec_mega.errors import RunError
from rlhfspec_mega.megatron.description import ModelDescription
from rlhfspec_mega.planning.placement import REFERENCE, REWARD
from rlhfspec_mega.rl.experience import Experience, Floats, ending_values
from rlhfspec_mega.rl.microbatch import Shard
from rlhfspec_mega.rl.packing import Batching, micro_batches
from rlhfspec_mega.rollout.scoring import ScoreReport, ScoringTask
from rlhfspec_mega.types import Span

_PAUSE_SECONDS = 0.1


class ScorerGroup:
    """Replicas of frozen models; each spans as many consecutive ranks as their tensor-parallel size.

    Implements rollout.scoring.Replicas.

    Args:
        workers: MegatronWorkers that hold models of these descriptions, replica after replica.
        engines: for each replica, the ranks of the engines on its devices.
        batching: how samples become micro-batches.
    """

    def __init__(
        self,
        cluster: Cluster,
        workers: WorkerGroup,
        descriptions: Sequence[ModelDescription],
        engines: Mapping[int, Collection[int]],
        batching: Batching,
    ) -> None:
        self._cluster, self._workers, self._engines, self._batching = cluster, workers, engines, batching
        self._names = " and ".join(one.name for one in descriptions)
        self.devices = descriptions[0].parallel.tensor

    def serving(self) -> list[int]:
        up = set(self._workers.serving())
        return [replica for replica in self._engines if up.issuperset(self._ranks(replica))]

    def engines(self, replica: int) -> Collection[int]:
        return self._engines[replica]

    def start(self, replica: int, tasks: Sequence[ScoringTask], models: Sequence[str]) -> list[Call]:
        shards = self._workers.share({model: self._shard(tasks, model) for model in models})
        return [self._workers.start(rank, "score", shards) for rank in self._ranks(replica)]

    def lost(self, calls: Sequence[Call]) -> bool:
        return any(call.dead or not self._workers.still_there(call) for call in calls)

    def report(
        self, replica: int, tasks: Sequence[ScoringTask], models: Sequence[str], answers: Sequence[Any]
    ) -> ScoreReport:
        """Scores of each sample and seconds of the pass. Raises RunError if one is missing."""
        (columns, span), *others = (answer for answer in answers if answer is not None)
        found: dict[str, dict[str, Floats]] = {}
        for model in models:
            shard, column = self._shard(tasks, model), columns.get(model, ())
            wanted = shard.samples.response_offsets[-1]
            if others or len(column) != wanted:
                raise RunError(f"The {model} model returned {len(column)} numbers for {wanted} tokens.")
            in_order = dict(zip(shard.indices, shard.samples.by_sample(column), strict=True))
            found[model] = {task.sample_id: in_order[number] for number, task in enumerate(tasks)}
        amounts: dict[str, float | int | str] = {"samples": len(tasks), "tokens": sum(task.tokens for task in tasks)}
        return ScoreReport(
            replica,
            found.get(REFERENCE, {}),
            Span("score", span.start, span.seconds, amounts),
            {sample_id: float(values[0]) for sample_id, values in found.get(REWARD, {}).items()},
        )

    def revive(self) -> None:
        while not self.serving():
            if not self._workers.ranks(WorkerState.STARTING, WorkerState.SUSPECT):
                raise RunError(
                    f"No replica of the {self._names} is left to score samples: each died more than "
                    "launcher.max_restarts times in one step; look into its log."
                )
            self._cluster.wait_started()
            time.sleep(_PAUSE_SECONDS)  # a suspected worker either answers again or is declared dead

    def _ranks(self, replica: int) -> range:
        return range(replica * self.devices, (replica + 1) * self.devices)

    def _shard(self, tasks: Sequence[ScoringTask], model: str) -> Shard:
        if model == REWARD:
            samples = ending_values([task.reward_tokens for task in tasks])
        else:
            samples = Experience.of([task.prompt_tokens for task in tasks], [task.response_tokens for task in tasks])
        (plan,) = micro_batches(samples.lengths.tolist(), self._batching)
        return Shard.cut(samples, plan, packed=self._batching.packed)
