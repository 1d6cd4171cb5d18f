"""Hands samples to engines, collects them as they finish, and accounts for every one of them, whatever dies."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rlhfspec_mega.ledger import Ledger
from rlhfspec_mega.rollout.assignment import Assignment
from rlhfspec_mega.types import DraftingTally, GenerationRequest, GenerationResult

Progress = Callable[[int, int], None]
_PAUSE_SECONDS = 0.01


class EngineCall(Protocol):
    """A call in flight on one engine; `dead` when the engine ended before it answered."""

    rank: int
    dead: bool

    def result(self) -> Any: ...


class EnginePool(Protocol):
    """The engines as the manager sees them; cluster.interface.WorkerGroup is one."""

    size: int

    def start(self, rank: int, method: str, *args: Any) -> Any: ...

    def serving(self) -> list[int]: ...

    def alive(self) -> list[int]: ...

    def launches(self, rank: int) -> int: ...


class Wait(Protocol):
    """Waits for the first of several calls; cluster.interface.Cluster.wait is one."""

    def __call__(self, calls: Sequence[Any], phase: str, *, first: bool, check: bool) -> Sequence[Any]: ...


class RolloutManager:
    """Drives all engines through one rollout at a time.

    A dead engine's samples go on elsewhere from the last tokens it reported. With `deterministic` they are decoded
    again from the prompt, in the batches they were in, by an engine that is done with its own: the same bits.

    Args:
        revive: called when no engine serves; returns when one does, or raises.
        poll_seconds: longest time an engine decodes before it answers.
    """

    def __init__(
        self,
        engines: EnginePool,
        wait: Wait,
        *,
        revive: Callable[[], None],
        poll_seconds: float,
        deterministic: bool = False,
    ) -> None:
        self._engines, self._wait, self._revive = engines, wait, revive
        self._poll_seconds, self._deterministic = poll_seconds, deterministic

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        ledger: Ledger,
        phase: str,
        progress: Progress | None = None,
    ) -> dict[str, GenerationResult]:
        """Decode all requests; results by sample id.

        Args:
            ledger: holds every sample as PENDING; they are FINISHED on return.

        Raises:
            RunError: an engine failed or lost a sample, one came back twice or unasked, or no engine could be revived.
        """
        work = Assignment(requests, self._engines.size, self._engines.serving(), ledger, repeat=self._deterministic)
        calls: dict[int, EngineCall] = {}
        given: dict[int, int] = {}  # by rank: the process that holds its samples
        while not work.done:
            self._take_back(work, given, calls)
            for rank in self._engines.serving():
                if rank not in calls and work.has_work(rank):
                    given[rank] = self._engines.launches(rank)
                    calls[rank] = self._engines.start(rank, "advance", work.take(rank), self._poll_seconds)
            if not calls and not self._engines.serving():
                self._revive()
            elif not calls:
                time.sleep(_PAUSE_SECONDS)  # a suspect engine holds what is left: it comes back or is given up
            for call in self._wait(list(calls.values()), phase, first=True, check=False):
                del calls[call.rank]
                if call.dead:
                    del given[call.rank]
                    work.lose(call.rank, self._engines.serving())
                else:
                    work.report(call.rank, call.result())
            if progress:
                progress(len(work.results), len(requests))
        return work.results

    def take_tallies(self, phase: str) -> list[DraftingTally]:
        """What speculation did on each serving engine since the last call; nothing without drafts."""
        calls = [self._engines.start(rank, "take_tally") for rank in self._engines.serving()]
        self._wait(calls, phase, first=False, check=False)
        tallies = [call.result() for call in calls if not call.dead]
        return [tally for tally in tallies if tally is not None]

    def _take_back(self, work: Assignment, given: dict[int, int], calls: dict[int, EngineCall]) -> None:
        """The work of engines that died between two calls, and of those that were away from the start."""
        alive = self._engines.alive()
        for rank in work.holders():
            there = rank in alive and given.get(rank, self._engines.launches(rank)) == self._engines.launches(rank)
            if not there and rank not in calls:
                given.pop(rank, None)
                work.lose(rank, self._engines.serving())
