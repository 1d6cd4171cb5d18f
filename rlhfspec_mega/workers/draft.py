"""The driver's view of a draft that learns beside a model, and its refreshes while engines still decode."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from rlhfspec_mega.cluster.interface import Call, WorkerGroup
from rlhfspec_mega.draft.refresh import DraftLearning, RefreshReport
from rlhfspec_mega.workers.model_group import ModelGroup

_MIN_TIME_SHARE = 0.5  # a refresh begins only if this share of its seconds is forecast to be free


class DraftGroup:
    """A draft on one rank of a model, loaded from its directory; resharding sends it to the engines.

    Args:
        learning: how the draft learns from every log-prob pass of the model; None: it does not learn.

    Attributes:
        rank: the rank of the model that holds and trains the draft.
    """

    def __init__(self, workers: WorkerGroup, model: ModelGroup, path: Path, learning: DraftLearning | None) -> None:
        self._workers = workers
        last_stage = model.description.parallel.pipeline - 1
        self.rank = model.positions.index((0, last_stage, 0))
        workers.call("start_draft", model.description.name, path, learning, phase="start draft")

    def refresh(self, *, steps: int | None, seconds: float | None) -> RefreshReport:
        """Train the draft on the samples it has kept, for a number of steps or of seconds."""
        reports = self._workers.call("refresh_draft", steps, seconds, phase="draft")
        return next(report for report in reports if report is not None)

    def start_refresh(self, seconds: float) -> list[Call]:
        """Start a refresh of so many seconds; the call of the draft's rank returns the report, the others None."""
        return [self._workers.start(rank, "refresh_draft", None, seconds) for rank in range(self._workers.size)]


class FreedRefresh:
    """Refreshes the draft at most once per rollout, while engines still decode. Implements `FreedWork`.

    The actor is idle while samples are generated. A refresh starts when no engine on the device of the draft's rank has
    samples left, or at once if no engine shares that device; the other ranks only contribute their parts of the
    vocabulary. The draft learns from samples of earlier steps.

    Args:
        begin: starts a refresh of so many seconds on all ranks of the actor.
        device: device of the actor rank that trains the draft.
        engine_devices: by rank of the engine.
        seconds: longest duration of a refresh.
    """

    def __init__(
        self,
        begin: Callable[[float], list[Call]],
        device: int,
        engine_devices: Sequence[tuple[int, ...]],
        seconds: float,
    ) -> None:
        self._begin, self._device, self._engine_devices, self._seconds = begin, device, engine_devices, seconds
        self._wanted = False
        self._calls: list[Call] = []

    def allow(self) -> None:
        """Allow a refresh during the coming rollout."""
        self._wanted = True

    def disallow(self) -> None:
        """Allow no refresh from now on."""
        self._wanted = False

    def offer(self, busy: Collection[int], seconds_left: Callable[[], float]) -> None:
        """Start a refresh if one is allowed, the device is free and enough time is left."""
        if not self._wanted or self._device in {device for rank in busy for device in self._engine_devices[rank]}:
            return
        if (seconds := min(self._seconds, seconds_left())) >= _MIN_TIME_SHARE * self._seconds:
            self._wanted = False
            self._calls = self._begin(seconds)

    def forget(self) -> list[Call]:
        """Allow no refresh from now on; returns the calls of a refresh that is running."""
        self.disallow()
        calls, self._calls = self._calls, []
        return calls

    def settle(self, wait: Callable[[Sequence[Call], str], object]) -> None:
        """Wait for a running refresh, so that the actor can take other calls; `take` still returns its report."""
        if self._calls:
            wait(self._calls, "draft")

    def take(self, wait: Callable[[Sequence[Call], str], object]) -> RefreshReport | None:
        """Wait for a running refresh and return its report; None if there was none or it had no samples to learn from.

        Raises what the wait raises.
        """
        self.settle(wait)
        reports = [call.result() for call in self.forget()]
        report = next((report for report in reports if report is not None), None)
        return report if report and report.steps else None
