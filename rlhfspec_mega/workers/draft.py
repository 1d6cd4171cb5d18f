"""The driver's view of the draft that learns on one rank of a model, and its refresh while engines still decode."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from rlhfspec_mega.cluster.interface import Call, WorkerGroup
from rlhfspec_mega.draft.refresh import DraftLearning, RefreshReport
from rlhfspec_mega.workers.model_group import ModelGroup

_LEAST_SHARE = 0.5  # of a refresh's seconds: for less freed time than that none is begun


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


class FreedRefresh:
    """At most one refresh in each rollout that is to have one. Implements `FreedWork`.

    The actor has nothing to do while samples are generated. The rank that trains the draft begins when no engine on its
    device has samples, or at once where it shares its device with none; the others only bring their parts of the
    vocabulary together. What it learns from are the samples of the steps before.

    Args:
        begin: begins a refresh of so many seconds on all ranks of the actor.
        device: of the actor rank that trains the draft.
        engine_devices: by rank of the engine.
        seconds: of a refresh, at most.
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
        """The rollout to come may have one."""
        self._wanted = True

    def disallow(self) -> None:
        """None is begun any more."""
        self._wanted = False

    def offer(self, busy: Collection[int], seconds_left: Callable[[], float]) -> None:
        """Begin, if this is wanted, the device is free and there is time enough."""
        if not self._wanted or self._device in {device for rank in busy for device in self._engine_devices[rank]}:
            return
        if (seconds := min(self._seconds, seconds_left())) >= _LEAST_SHARE * self._seconds:
            self._wanted = False
            self._calls = self._begin(seconds)

    def forget(self) -> list[Call]:
        """Want no refresh any more; the calls of one that was begun."""
        self.disallow()
        calls, self._calls = self._calls, []
        return calls

    def settle(self, wait: Callable[[Sequence[Call], str], object]) -> None:
        """Wait for a refresh that was begun, so that the actor can be asked for something else; `take` reports it."""
        if self._calls:
            wait(self._calls, "draft")

    def take(self, wait: Callable[[Sequence[Call], str], object]) -> RefreshReport | None:
        """Wait for the refresh, if one was begun, before the actor is asked for anything else.

        None where there was none, or nothing to learn from yet. Raises what the wait raises.
        """
        self.settle(wait)
        reports = [call.result() for call in self.forget()]
        report = next((report for report in reports if report is not None), None)
        return report if report and report.steps else None
