"""The driver's manager of rollouts: starts each one, waits for its end, and completes the scoring of its samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rlhfspec_mega.ledger.ledger import Ledger
from rlhfspec_mega.observe.timeline import Timeline
from rlhfspec_mega.rollout.assignment import Assignment
from rlhfspec_mega.rollout.journal import Journal
from rlhfspec_mega.rollout.migration.messages import PeerInfo
from rlhfspec_mega.rollout.reallocation import Reallocation
from rlhfspec_mega.rollout.scoring import Scoring, ScoringLeft
from rlhfspec_mega.rollout.session import EnginePool, FreedWork, Session
from rlhfspec_mega.types import DraftingTally, GenerationRequest, GenerationResult, TailTally

Progress = Callable[[int, int], None]
Ended = Callable[[GenerationResult], None]
_PAUSE_SECONDS = 0.01


class Wait(Protocol):
    """Waits for the first of several calls; cluster.interface.Cluster.wait is one."""

    def __call__(self, calls: Sequence[Any], phase: str, *, first: bool, check: bool) -> Sequence[Any]: ...


class RolloutManager:
    """Runs all engines through one rollout at a time.

    Other engines continue a dead engine's samples from the last tokens that it reported. With `deterministic`, an
    engine that has finished its own samples decodes them again from the prompt in the same batches, which gives the
    same bits.

    Args:
        wait: waits for calls; see Wait.
        revive: called when no engine serves; returns when one does, or raises.
        poll_seconds: longest time an engine decodes before it reports.
        slots: samples that an engine decodes at once, if samples beyond them wait for it in a shared queue; None: they
            do not; see Assignment.
        reallocation: migrates samples while they are decoded; not with `deterministic`.
        timeline: records what the engines do.
        freed_work: other work for freed devices, offered when all finished samples are scored; only with
            `reallocation`, which predicts how long the devices are free.
    """

    def __init__(
        self,
        engines: EnginePool,
        wait: Wait,
        *,
        revive: Callable[[], None],
        poll_seconds: float,
        deterministic: bool = False,
        slots: int | None = None,
        reallocation: Reallocation | None = None,
        timeline: Timeline | None = None,
        freed_work: FreedWork | None = None,
    ) -> None:
        self._engines, self._wait, self._revive = engines, wait, revive
        self._poll_seconds, self._deterministic, self._slots = poll_seconds, deterministic, slots
        self._reallocation, self._journal, self._freed_work = reallocation, Journal(timeline), freed_work

    def begin(
        self, requests: Sequence[GenerationRequest], ledger: Ledger, phase: str, scoring: Scoring | None = None
    ) -> Session:
        """Start a rollout of these samples, to which more may be added; `drain` or `abort` must end it.

        Args:
            ledger: has every sample as PENDING; the rollout makes it FINISHED.
            phase: name for errors and the timeline.
            scoring: gets the finished samples and scores them on devices of engines without samples.
        """
        serving = self._engines.serving()
        reallocation = self._reallocation if requests and len(serving) > 1 else None
        if reallocation:
            reallocation.begin(requests, self._join_migration(requests[0].temperature, phase))
            serving = self._engines.serving()
        work = Assignment(
            requests,
            self._engines.size,
            serving,
            ledger,
            deterministic=self._deterministic,
            slots=self._slots,
        )
        self._journal.begin(serving)
        session = Session(
            self._engines, work, self._poll_seconds, self._journal, reallocation, scoring, self._freed_work
        )
        session.advance()
        return session

    def drain(
        self, session: Session, phase: str, progress: Progress | None = None, ended: Ended | None = None
    ) -> dict[str, GenerationResult]:
        """Wait until all samples of a session have ended; returns the results by sample id.

        Samples may still be waiting for their scores; `finish_scoring` completes them.

        Args:
            ended: called with each result as it comes.

        Raises:
            RunError: an engine failed, lost a sample, or returned one twice or one that it was not given; or no engine
                could be revived.
        """
        session.pause(False)
        while not session.done:  # not before the last call of an engine has returned, even if all samples have ended
            self._handle_next_answers(session, phase)
            if progress:
                progress(len(session.results), session.samples)
            if ended:
                for result in session.take():
                    ended(result)
        session.end()
        if session.reallocates:
            self._clear(phase)  # drop copies of prompts, and of samples whose migration failed halfway
        return session.results

    def pause_and_wait(self, session: Session, phase: str) -> None:
        """Pause a session and wait until all its engines are idle, e.g. for a weight update; they keep their samples.

        `session.pause(False)` resumes it.
        """
        session.pause()
        while not session.idle:
            session.handle_answers(self._wait(session.calls(), phase, first=True, check=False))

    def abort(self, session: Session, phase: str) -> list[str]:
        """End a session at once and drop its samples from the engines; returns the ids of those that have not ended.

        Waits for batches that are being scored.
        """
        self.pause_and_wait(session, phase)
        while calls := session.calls():
            session.handle_answers(self._wait(calls, phase, first=True, check=False))
        self._clear(phase)
        return session.abandon()

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        ledger: Ledger,
        phase: str,
        progress: Progress | None = None,
        scoring: Scoring | None = None,
        ended: Ended | None = None,
    ) -> dict[str, GenerationResult]:
        """Decode all requests; returns the results by sample id. Arguments and errors as for `begin` and `drain`."""
        return self.drain(self.begin(requests, ledger, phase, scoring), phase, progress, ended)

    def finish_scoring(self, scoring: Scoring, phase: str) -> None:
        """Score all finished samples that are left. Raises RunError if a replica failed or none is left."""
        left = self.scoring_left(scoring)
        while not scoring.done:
            scoring.start_or_revive()
            left.handle_answers(self._wait(scoring.calls(), phase, first=True, check=False))
        if self._reallocation and scoring.seconds_per_token:
            self._reallocation.scoring.seconds_per_token = scoring.seconds_per_token

    def scoring_left(self, scoring: Scoring) -> ScoringLeft:
        """Scoring of samples that a rollout ended without; it goes on while the driver waits for other work."""
        return ScoringLeft(scoring, self._journal.scored)

    def take_tail(self) -> TailTally:
        """Counters of migrations and fused scoring since the last call."""
        return self._journal.take()

    def take_tallies(self, phase: str) -> list[DraftingTally]:
        """Counters of speculation on each serving engine since the last call; empty without drafts."""
        calls = [self._engines.start(rank, "take_tally") for rank in self._engines.serving()]
        self._wait(calls, phase, first=False, check=False)
        tallies = [call.result() for call in calls if not call.dead]
        return [tally for tally in tallies if tally is not None]

    def _join_migration(self, temperature: float, phase: str) -> dict[int, PeerInfo]:
        """Prepare each serving engine for migrations; what it says of itself, by rank."""
        calls = [self._engines.start(rank, "join_migration", temperature) for rank in self._engines.serving()]
        self._wait(calls, phase, first=False, check=False)
        return {call.rank: call.result() for call in calls if not call.dead}

    def _clear(self, phase: str) -> None:
        calls = [self._engines.start(rank, "clear") for rank in self._engines.serving()]
        self._wait(calls, phase, first=False, check=False)

    def _handle_next_answers(self, session: Session, phase: str) -> None:
        """Wait for the next answers and process them; if no call is in flight, wait for a serving engine."""
        if session.idle and not self._engines.serving():
            session.pause()  # an engine that has its weights but not yet its draft gets no samples
            self._revive()
            session.pause(False)
        elif session.idle:
            time.sleep(_PAUSE_SECONDS)  # a suspect engine has the remaining samples: it recovers or is declared dead
        session.handle_answers(self._wait(session.calls(), phase, first=True, check=False))
