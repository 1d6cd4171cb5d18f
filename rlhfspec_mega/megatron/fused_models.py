"""The models of a rank that can train in one pass, because their pipelines run in opposite directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

from rlhfspec_mega.megatron.channels import Channels
from rlhfspec_mega.megatron.fused_pass import FusedPass
from rlhfspec_mega.megatron.model import MegatronModel, on_megatron
from rlhfspec_mega.megatron.readout import Columns
from rlhfspec_mega.planning.pipeline.rank_task import RankTask, TaskTime
from rlhfspec_mega.rl.microbatch import MicroBatch, Objective


class FusedModels:
    """Two models of a rank and their channels; nothing if no model's pipeline runs opposite to another's."""

    def __init__(self, models: Mapping[str, MegatronModel]) -> None:
        learning = {name: one for name, one in models.items() if one.description.learning is not None}
        opposed = any(one.description.parallel.opposed_to for one in learning.values())
        self._models = learning if opposed else {}
        self._channels = {
            name: Channels(one.groups, timedelta(seconds=one.call_timeout), one.device)
            for name, one in self._models.items()
        }

    @on_megatron
    def accumulate(
        self,
        batches: Mapping[str, Sequence[MicroBatch]],
        objectives: Mapping[str, Objective],
        tasks: Sequence[RankTask],
        computed: Callable[[RankTask, float], None] = lambda task, began: None,
    ) -> tuple[dict[str, tuple[dict[str, float], Columns | None]], list[TaskTime]]:
        """By model what MegatronModel.accumulate returns, after all tasks in their order, and the times of these.

        Args:
            computed: see FusedPass.
        """
        models = {name: self._models[name] for name in batches}
        passes = {
            name: one.gradient_pass(
                batches[name], objectives[name].loss, objectives[name].metrics, objectives[name].keep_columns
            )
            for name, one in models.items()
        }
        times = FusedPass(passes, self._channels, computed).run(tasks)
        # In the same order on all ranks: each ends in collectives of the model.
        found = {
            name: one.pass_result(passes[name], objectives[name].metrics, passes[name].end())
            for name, one in models.items()
        }
        return found, times
