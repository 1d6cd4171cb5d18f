"""One rollout after another: begins it, waits for its end, and finishes the scoring of its samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rlhfspec_mega.ledger.ledger import Ledger
from rlhfspec_mega.observe.timeline import Timeline
from rlhfspec_mega.rollout.assignment import Assignment
from rlhfspec_mega.rollout.journal import Journal
from rlhfspec_mega.rollout.migration.messages import Meeting
from rlhfspec_mega.rollout.reallocation import Reallocation
from rlhfspec_mega.rollout.scoring import Scoring
from rlhfspec_mega.rollout.session import EnginePool, FreedWork, Session
from rlhfspec_mega.types import DraftingTally, GenerationRequest, GenerationResult, TailTally

Progress = Callable[[int, int], None]
_PAUSE_SECONDS = 0.01


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
        at_once: samples an engine is given at once, see Assignment.
        reallocation: moves samples while they are decoded; not with `deterministic`.
        timeline: is told what the engines do.
        freed_work: is offered freed devices' time after all finished samples are scored; with `reallocation`, which
            knows how long that is.
    """

    def __init__(
        self,
        engines: EnginePool,
        wait: Wait,
        *,
        revive: Callable[[], None],
        poll_seconds: float,
        deterministic: bool = False,
        at_once: int | None = None,
        reallocation: Reallocation | None = None,
        timeline: Timeline | None = None,
        freed_work: FreedWork | None = None,
    ) -> None:
        self._engines, self._wait, self._revive = engines, wait, revive
        self._poll_seconds, self._deterministic, self._at_once = poll_seconds, deterministic, at_once
        self._reallocation, self._journal, self._freed_work = reallocation, Journal(timeline), freed_work

    def begin(
        self, requests: Sequence[GenerationRequest], ledger: Ledger, phase: str, scoring: Scoring | None = None
    ) -> Session:
        """A rollout of these samples, and of more that may follow; `drain` or `abort` must end it.

        Args:
            ledger: holds every sample as PENDING; each is FINISHED when it has ended.
            scoring: takes finished samples, which are scored on devices of engines without samples.
        """
        serving = self._engines.serving()
        reallocation = self._reallocation if requests and len(serving) > 1 else None
        if reallocation:
            reallocation.begin(requests, self._meet(requests[0].temperature, phase))
            serving = self._engines.serving()
        work = Assignment(
            requests, self._engines.size, serving, ledger, repeat=self._deterministic, at_once=self._at_once
        )
        self._journal.begin(serving)
        session = Session(
            self._engines, work, self._poll_seconds, self._journal, reallocation, scoring, self._freed_work
        )
        session.advance()
        return session

    def drain(self, session: Session, phase: str, progress: Progress | None = None) -> dict[str, GenerationResult]:
        """Wait until all samples of a session have ended; results by sample id.

        Some may still be being scored; `finish_scoring` does the rest.

        Raises:
            RunError: an engine failed or lost a sample, one came back twice or unasked, or no engine could be revived.
        """
        session.pause(False)
        while not session.done:  # an engine that waits for what ended elsewhere is heard out
            self._hear(session, phase)
            if progress:
                progress(len(session.results), session.samples)
        session.end()
        if session.moves:
            self._clear(phase)  # copies of prompts, and of samples whose move failed halfway, are of no use to anyone
        return session.results

    def settle(self, session: Session, phase: str) -> None:
        """Have all engines of a session fall idle with the samples that they hold, e.g. for a weight update.

        `session.pause(False)` lets them go on.
        """
        session.pause()
        while not session.idle:
            session.heard(self._wait(session.calls(), phase, first=True, check=False))

    def abort(self, session: Session, phase: str) -> list[str]:
        """End a session at once; ids of its samples that have not ended, of which engines forget what they hold.

        A batch that is being scored is waited for.
        """
        self.settle(session, phase)
        while calls := session.calls():
            session.heard(self._wait(calls, phase, first=True, check=False))
        self._clear(phase)
        return session.give_up()

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        ledger: Ledger,
        phase: str,
        progress: Progress | None = None,
        scoring: Scoring | None = None,
    ) -> dict[str, GenerationResult]:
        """Decode all requests; results by sample id. Arguments and errors as of `begin` and `drain`."""
        return self.drain(self.begin(requests, ledger, phase, scoring), phase, progress)

    def finish_scoring(self, scoring: Scoring, phase: str) -> None:
        """Have what waits scored. Raises RunError: a replica failed, or none is left."""
        while not scoring.done:
            scoring.go_on()
            for call in self._wait(scoring.calls(), phase, first=True, check=False):
                if report := scoring.heard(call):
                    self._journal.scored(report)
        if self._reallocation and scoring.seconds_per_token:
            self._reallocation.scoring.seconds_per_token = scoring.seconds_per_token

    def take_tail(self) -> TailTally:
        """What was done about the long tail since the last call."""
        return self._journal.take()

    def take_tallies(self, phase: str) -> list[DraftingTally]:
        """What speculation did on each serving engine since the last call; nothing without drafts."""
        calls = [self._engines.start(rank, "take_tally") for rank in self._engines.serving()]
        self._wait(calls, phase, first=False, check=False)
        tallies = [call.result() for call in calls if not call.dead]
        return [tally for tally in tallies if tally is not None]

    def _meet(self, temperature: float, phase: str) -> dict[int, Meeting]:
        """What each engine that serves tells about itself."""
        calls = [self._engines.start(rank, "meet", temperature) for rank in self._engines.serving()]
        self._wait(calls, phase, first=False, check=False)
        return {call.rank: call.result() for call in calls if not call.dead}

    def _clear(self, phase: str) -> None:
        calls = [self._engines.start(rank, "clear") for rank in self._engines.serving()]
        self._wait(calls, phase, first=False, check=False)

    def _hear(self, session: Session, phase: str) -> None:
        """Wait for the next answers and file them; without any call in flight, for an engine that serves."""
        if session.idle and not self._engines.serving():
            session.pause()  # no samples for an engine that gets its weights, but not yet its draft
            self._revive()
            session.pause(False)
        elif session.idle:
            time.sleep(_PAUSE_SECONDS)  # a suspect engine holds what is left: it comes back or is given up
        session.heard(self._wait(session.calls(), phase, first=True, check=False))
