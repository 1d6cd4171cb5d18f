"""One rollout under way: samples go to engines, come back as they end, and are accounted for, whatever dies.

It never waits by itself: the manager does, or the cluster while the driver waits for something else.
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


class EngineCall(Protocol):
    """A call in flight on one engine; `dead` when the engine ended before it answered."""

    rank: int
    dead: bool

    def result(self) -> Any: ...


class EnginePool(Protocol):
    """The engines as a session sees them; cluster.interface.WorkerGroup is one."""

    size: int

    def start(self, rank: int, method: str, *args: Any) -> Any: ...

    def serving(self) -> list[int]: ...

    def alive(self) -> list[int]: ...

    def launches(self, rank: int) -> int: ...


class FreedWork(Protocol):
    """Work for devices without samples, beside the scoring of finished ones."""

    def offer(self, busy: set[int], seconds_left: Callable[[], float]) -> None:
        """All engines but the `busy` ones have nothing to do until the rollout ends, in about so many seconds."""


class Session:
    """Samples that engines decode while others wait. Made by RolloutManager.begin.

    Implements cluster.interface.Background: between two answers of engines it needs a moment of the driver's time.

    Args:
        poll_seconds: longest time an engine decodes before it answers.
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
        # By rank, which of its processes was given something.
        self._given = {rank: engines.launches(rank) for rank in engines.serving()}
        self._ours = set(reallocation.met()) if reallocation else set[int]()  # engines that hold this session's alone
        self._cut: dict[int, list[int]] = {}  # by rank, dead engines whose messages its call in flight takes
        self._idle = False  # an engine has run out of samples, and no plan was made since
        self._paused = self._holds_scoring = False
        self._taken = 0

    @property
    def done(self) -> bool:
        """Whether all samples have ended, and no engine is at work."""
        return self._work.done and not self._calls

    @property
    def idle(self) -> bool:
        """Whether no engine is at work."""
        return not self._calls

    @property
    def moves(self) -> bool:
        """Whether samples may move between engines."""
        return self._reallocation is not None

    @property
    def results(self) -> dict[str, GenerationResult]:
        """Finished samples by id."""
        return self._work.results

    @property
    def samples(self) -> int:
        """Samples begun so far."""
        return len(self._work.known)

    def calls(self) -> list[Any]:
        """In flight, on engines and on replicas of the reference."""
        return [*self._calls.values(), *(self._scoring.calls() if self._scoring else ())]

    def start(self, requests: Sequence[GenerationRequest]) -> None:
        """More samples, which the ledger holds as PENDING. Raises RunError for one that is known."""
        if self._reallocation:
            self._reallocation.add(requests)
        self._work.add(requests, self._engines.serving())
        self.advance()

    def take(self) -> list[GenerationResult]:
        """Samples that have ended since the last call, in that order."""
        fresh = list(self.results.values())[self._taken :]
        self._taken += len(fresh)
        return fresh

    def pause(self, paused: bool = True) -> None:
        """Give engines nothing new, e.g. before a weight update: they keep their samples and fall idle.

        With False they go on.
        """
        self._paused = paused
        self.advance()

    def hold_scoring(self, held: bool) -> None:
        """Whether what has ended is to wait, as its replicas' devices are busy with something else."""
        self._holds_scoring = held

    def unfinished(self) -> list[str]:
        """Ids of samples that have not ended."""
        return [sample_id for sample_id in self._work.known if sample_id not in self.results]

    # Pumping

    def heard(self, calls: Sequence[Any]) -> None:
        """File these answers, and give engines what comes next.

        Raises RunError: an engine or a replica failed or lost a sample, or one came back twice or unasked.
        """
        for call in calls:
            if call in self._calls.values():
                self._file(call)
            elif self._scoring and (report := self._scoring.heard(call)):
                self._journal.scored(report)
        self.advance()

    def advance(self) -> None:
        """Give every engine that waits what there is for it."""
        if self._work.done:
            self._journal.end()
        if self._paused:  # an engine that waits for new weights keeps its samples meanwhile
            return
        self._take_back()
        if self._idle:
            self._plan()  # first: there may be samples for it, and else its device scores finished ones
        self._start_calls()
        self._plan()  # while all decode

    def _plan(self) -> None:
        """Let samples be reallocated if a plan is due."""
        reallocation = self._reallocation
        if reallocation is None or self._work.done or not reallocation.due(urgent=self._idle):
            return
        self._idle = False
        unscored = self._scoring.unscored_tokens if self._scoring else None
        if reallocation.plan(self._work, self._engines.serving(), unscored):
            self._offer_freed(reallocation)

    def _offer_freed(self, reallocation: Reallocation) -> None:
        """After a plan, which gives an engine that has emptied new samples if there are any for it.

        Scoring comes first: training waits for it.
        """
        if self._freed_work and (self._scoring is None or self._scoring.done):
            self._freed_work.offer(self._busy(), reallocation.seconds_left)

    def _busy(self) -> set[int]:
        """Engines with samples."""
        return {*self._calls, *(rank for rank in self._engines.alive() if self._work.has_work(rank))}

    def _start_calls(self) -> None:
        """Have every engine that waits decode what there is for it, and what has ended scored where none does."""
        if self._work.done:
            return
        for rank in self._engines.serving():
            if rank not in self._calls and self._work.has_work(rank):
                self._given[rank] = self._engines.launches(rank)
                self._calls[rank] = self._decode(rank)
        if self._scoring and not self._holds_scoring:
            self._scoring.start(self._busy())

    def _decode(self, rank: int) -> EngineCall:
        """Begin to hand over what is queued for an engine, and to decode."""
        samples = self._work.take(rank)
        self._journal.live(rank, self._work.custody.held(rank))
        orders, forget = None, rank not in self._ours
        self._ours.add(rank)
        if self._reallocation:
            self._cut[rank] = self._work.custody.open_sources(rank)
            orders = self._reallocation.orders(rank, self._work)
        return self._engines.start(rank, "advance", samples, self._poll_seconds, orders, forget)

    def _file(self, call: EngineCall) -> None:
        """Take note of an engine's answer, or of its death."""
        rank = call.rank
        del self._calls[rank]
        if call.dead:
            self._given.pop(rank, None)
            self._lose(rank)
        else:
            self._decoded(rank, call.result())

    def _decoded(self, rank: int, report: EngineReport) -> None:
        work, serving = self._work, self._engines.serving()
        work.report(rank, report, serving)
        counting = [result for result in report.finished if work.results.get(result.sample_id) is result]
        if self._scoring:
            for result in counting:
                self._scoring.add(work.known[result.sample_id].request, result)
        if self._reallocation:
            work.cut(rank, self._cut.pop(rank), serving)
            self._journal.moved(self._reallocation.note(rank, counting, report.migration.landings))
        self._idle |= not work.has_work(rank)
        self._journal.decoded(rank, report.spans, work.custody.held(rank))

    # What dies

    def _lose(self, rank: int) -> None:
        self._ours.discard(rank)
        self._work.lose(rank, self._engines.serving())
        if self._reallocation:
            self._reallocation.lose(rank)
        self._journal.gone(rank)

    def _take_back(self) -> None:
        """The work of engines that died between two calls, missed a weight update, or were away from the start."""
        alive, given = self._engines.alive(), self._given
        for rank in sorted({*self._work.holders(), *given}):
            there = rank in alive and given.get(rank, self._engines.launches(rank)) == self._engines.launches(rank)
            if not there and rank not in self._calls:
                given.pop(rank, None)
                self._lose(rank)

    # Its end

    def end(self) -> None:
        """All samples have ended. Raises RunError where that is not so."""
        if not self.done:
            raise RunError(f"A rollout was ended with {len(self.unfinished())} samples under way.")
        self._end()

    def give_up(self) -> list[str]:
        """Ids of samples that have not ended, which nobody has any more: they are PENDING again in the ledger.

        Raises RunError while an engine is at work.
        """
        if self.calls():
            raise RunError("A rollout was given up while engines were at work.")
        self._end()
        return self.unfinished()

    def _end(self) -> None:
        self._work.custody.end()
        self._journal.end()
        if self._reallocation:
            self._reallocation.end()
