"""The driver's view of the draft that learns beside a model: on one of its ranks."""

from __future__ import annotations

from pathlib import Path

from rlhfspec_mega.cluster.interface import Call, WorkerGroup
from rlhfspec_mega.drafting.trainer import RefreshReport
from rlhfspec_mega.megatron.draft_learning import DraftLearning
from rlhfspec_mega.workers.model_group import ModelGroup


class DraftGroup:
    """A draft held from its directory beside a model, to be sent to engines with it.

    Args:
        learning: how it learns from every log-prob pass of the model from now on; None: not at all.

    Attributes:
        rank: the one that holds and trains it.
    """

    def __init__(self, workers: WorkerGroup, model: ModelGroup, path: Path, learning: DraftLearning | None) -> None:
        self._workers = workers
        last_stage = model.description.parallel.pipeline - 1
        self.rank = model.positions.index((0, last_stage, 0))
        workers.call("start_draft", model.description.name, path, learning, phase="start draft")

    def refresh(self, *, steps: int | None, seconds: float | None) -> RefreshReport:
        """Train it on what it has kept, by count or by time."""
        reports = self._workers.call("refresh_draft", steps, seconds, phase="draft")
        return next(report for report in reports if report is not None)

    def start_refresh(self, seconds: float) -> list[Call]:
        """Begin `refresh` by time; the calls' results are its report and None of the other ranks."""
        return [self._workers.start(rank, "refresh_draft", None, seconds) for rank in range(self._workers.size)]
