"""One rollout in progress: gives samples to engines, collects results, and recovers samples of engines that die.

A session never blocks: the manager waits for its calls, or the cluster does while the driver waits for something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.rollout.assignment import Assignment
from rlhfspec_mega.rollout.journal import Journal
from rlhfspec_mega.rollout.reallocation import Reallocation
from rlhfspec_mega.rollout.scoring import Scoring
from rlhfspec_mega.types import EngineReport, GenerationRequest, GenerationResult

MORE_OFTEN = 4  # times as often engines report while one of them has no samples and a plan is to be made


class EngineCall(Protocol):
    """A call in flight on one engine; `dead` when the engine ended before it answered."""

    rank: int
    dead: bool

    def result(self) -> Any: ...


class EnginePool(Protocol):
    """The engines, as a session uses them; cluster.interface.WorkerGroup is one."""

    size: int

    def start(self, rank: int, method: str, *args: Any) -> Any: ...

    def serving(self) -> list[int]: ...

    def alive(self) -> list[int]: ...

    def launches(self, rank: int) -> int: ...


class FreedWork(Protocol):
    """Work other than scoring for devices whose engines have no samples."""

    def offer(self, busy: set[int], seconds_left: Callable[[], float]) -> None:
        """Offer the devices of all engines except the `busy` ranks until the rollout ends in about `seconds_left()`."""


class Session:
    """A rollout in progress, made by RolloutManager.begin.

    Implements cluster.interface.Background: the driver calls `handle_answers` whenever engines have answered.

    Args:
        poll_seconds: longest time an engine decodes before it reports.
    """

    def __init__(
        self,
        engines: EnginePool,
        work: Assignment,
        poll_seconds: float,
        journal: Journal,
        reallocation: Reallocation | None = None,
        scoring: Scoring | None = None,
        freed_work: FreedWork | None = None,
    ) -> None:
        self._engines, self._work, self._poll_seconds, self._journal = engines, work, poll_seconds, journal
        self._reallocation, self._scoring, self._freed_work = reallocation, scoring, freed_work
        self._calls: dict[int, EngineCall] = {}  # in flight, by rank
        # By rank, the launch number of the engine process that was last given samples.
        self._launches = {rank: engines.launches(rank) for rank in engines.serving()}
        # Engines that have no samples of an earlier session.
        self._cleared = set(reallocation.participants()) if reallocation else set[int]()
        self._draining: dict[int, list[int]] = {}  # by rank, dead engines whose last messages its call in flight takes
        self._idle = False  # an engine has run out of samples since the last plan
        self._paused = self._scoring_held = False
        self._taken = 0

    @property
    def done(self) -> bool:
        """Whether all samples have ended and no call to an engine is in flight."""
        return self._work.done and not self._calls

    @property
    def idle(self) -> bool:
        """Whether no call to an engine is in flight."""
        return not self._calls

    @property
    def reallocates(self) -> bool:
        """Whether samples may migrate between engines."""
        return self._reallocation is not None

    @property
    def results(self) -> dict[str, GenerationResult]:
        """Finished samples by id."""
        return self._work.results

    @property
    def samples(self) -> int:
        """Number of samples added so far."""
        return len(self._work.known)

    def calls(self) -> list[Any]:
        """The calls in flight, on engines and on replicas of the reference."""
        return [*self._calls.values(), *(self._scoring.calls() if self._scoring else ())]

    def start(self, requests: Sequence[GenerationRequest]) -> None:
        """Add samples, which the ledger has as PENDING. Raises RunError for a sample that was added before."""
        if self._reallocation:
            self._reallocation.add(requests)
        self._work.add(requests, self._engines.serving())
        self.advance()

    def take(self) -> list[GenerationResult]:
        """Samples that have ended since the last call, in the order of their ends."""
        fresh = list(self.results.values())[self._taken :]
        self._taken += len(fresh)
        return fresh

    def pause(self, paused: bool = True) -> None:
        """Start no more calls on engines, e.g. before a weight update: they keep their samples and become idle.

        With False, resume.
        """
        self._paused = paused
        if paused and self._reallocation:
            self._reallocation.ask_reports(self._calls)
        self.advance()

    def hold_scoring(self, held: bool) -> None:
        """Start or stop holding back the scoring of finished samples, while the replicas' devices are in other use."""
        self._scoring_held = held

    def unfinished(self) -> list[str]:
        """Ids of samples that have not ended."""
        return [sample_id for sample_id in self._work.known if sample_id not in self.results]

    # Progress

    def handle_answers(self, calls: Sequence[Any]) -> None:
        """Process calls that were answered or whose workers have died, then start the next calls.

        Raises RunError if an engine or a replica failed, lost a sample, or returned one twice or one that it was not
        given.
        """
        for call in calls:
            if call in self._calls.values():
                self._file(call)
            elif self._scoring and (report := self._scoring.handle_answer(call)):
                self._journal.scored(report)
        self.advance()

    def advance(self) -> None:
        """Start a call on every idle engine for which there are samples."""
        if self._work.done:
            self._journal.end()
        if self._paused:
            return
        self._reclaim_lost()
        if self._work.done:
            return
        self._start_engines()
        reallocation = self._reallocation
        if reallocation and not self._work.waiting:  # of waiting samples each engine takes what it has room for
            if self._idle and reallocation.awaits_reports(self._calls):
                return  # in a moment the idle engine may get samples: no scoring begins on its device
            if reallocation.due(urgent=self._idle):
                self._plan(reallocation)
                self._start_engines()
        if self._scoring and not self._scoring_held:
            self._scoring.start(self._busy())

    def _plan(self, reallocation: Reallocation) -> None:
        """Make a reallocation plan while engines decode, and send its orders."""
        self._idle = False
        unscored = self._scoring.unscored_tokens if self._scoring else None
        if reallocation.plan(self._work, self._engines.serving(), unscored):
            reallocation.send_orders(self._calls, self._work)
            self._offer_freed(reallocation)

    def _offer_freed(self, reallocation: Reallocation) -> None:
        """Offer the devices of engines that have no samples even after a plan.

        Only once all finished samples are scored, because training waits for the scores.
        """
        if self._freed_work and (self._scoring is None or self._scoring.done):
            self._freed_work.offer(self._busy(), reallocation.seconds_left)

    def _busy(self) -> set[int]:
        """Ranks of engines that have samples, can get some, or have a call in flight."""
        return {*self._calls, *(rank for rank in self._engines.alive() if self._work.has_work(rank))}

    def _start_engines(self) -> None:
        """Start decoding on every idle engine with samples."""
        waited, serving = self._work.waiting, self._engines.serving()
        for rank in serving:
            if rank not in self._calls and self._work.has_work(rank):
                self._launches[rank] = self._engines.launches(rank)
                self._calls[rank] = self._decode(rank)
        if waited and not self._work.waiting:  # some of them may have got nothing
            self._idle |= any(rank not in self._calls for rank in serving)

    def _decode(self, rank: int) -> EngineCall:
        """Give an engine the samples that are queued for it and let it decode."""
        samples = self._work.take(rank)
        self._journal.live(rank, self._work.custody.held(rank))
        orders, forget, seconds = None, rank not in self._cleared, self._poll_seconds
        self._cleared.add(rank)
        if self._reallocation:
            self._draining[rank] = self._work.custody.open_sources(rank)
            orders = self._reallocation.orders(rank, self._work)
            if self._idle:  # reports are the only clock by which a plan for an engine without samples is made
                seconds /= MORE_OFTEN
        return self._engines.start(rank, "advance", samples, seconds, orders, forget, self._work.waiting)

    def _file(self, call: EngineCall) -> None:
        """Process an engine's answer or its death."""
        rank = call.rank
        del self._calls[rank]
        if call.dead:
            self._launches.pop(rank, None)
            self._lose(rank)
        else:
            self._file_report(rank, call.result())

    def _file_report(self, rank: int, report: EngineReport) -> None:
        work, serving = self._work, self._engines.serving()
        work.report(rank, report, serving)
        counting = [result for result in report.finished if work.results.get(result.sample_id) is result]
        if self._scoring:
            for result in counting:
                self._scoring.add(work.known[result.sample_id].request, result)
        if self._reallocation:
            work.sources_drained(rank, self._draining.pop(rank), serving)
            self._journal.moved(self._reallocation.record(rank, counting, report.migration.landings))
        self._idle |= not work.has_work(rank)
        self._journal.decoded(rank, report.spans, work.custody.held(rank))

    # Recovery

    def _lose(self, rank: int) -> None:
        self._cleared.discard(rank)
        self._work.lose(rank, self._engines.serving())
        if self._reallocation:
            self._reallocation.lose(rank)
        self._journal.gone(rank)

    def _reclaim_lost(self) -> None:
        """Reassign the samples of engines that died between two calls, missed a weight update or never served."""
        alive, launches = self._engines.alive(), self._launches
        for rank in sorted({*self._work.holders(), *launches}):
            there = rank in alive and launches.get(rank, self._engines.launches(rank)) == self._engines.launches(rank)
            if not there and rank not in self._calls:
                launches.pop(rank, None)
                self._lose(rank)

    # End

    def end(self) -> None:
        """End the session. Raises RunError if samples have not ended or a call is in flight."""
        if not self.done:
            raise RunError(f"A rollout was ended while {len(self.unfinished())} of its samples were unfinished.")
        self._end()

    def abandon(self) -> list[str]:
        """End the session early; its unfinished samples become PENDING again in the ledger.

        Returns:
            the ids of the unfinished samples.

        Raises:
            RunError: a call is in flight.
        """
        if self.calls():
            raise RunError("A rollout was abandoned while calls to its engines were in flight.")
        self._end()
        return self.unfinished()

    def _end(self) -> None:
        self._work.custody.end()
        self._journal.end()
        if self._reallocation:
            self._reallocation.end()
