"""Hands samples to engines, collects them as they finish, and accounts for every one of them, whatever dies."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlhfspec_mega.ledger import Ledger
from rlhfspec_mega.observe.timeline import Timeline
from rlhfspec_mega.rollout.assignment import Assignment
from rlhfspec_mega.rollout.journal import Journal
from rlhfspec_mega.rollout.migration.messages import Meeting
from rlhfspec_mega.rollout.reallocation import Reallocation
from rlhfspec_mega.rollout.scoring import Scoring
from rlhfspec_mega.types import DraftingTally, EngineReport, GenerationRequest, GenerationResult, TailTally

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


class FreedWork(Protocol):
    """Work for devices without samples, beside the scoring of finished ones."""

    def offer(self, busy: Collection[int], seconds_left: Callable[[], float]) -> None:
        """All engines but the `busy` ones have nothing to do until the rollout ends, in about so many seconds."""


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

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        ledger: Ledger,
        phase: str,
        progress: Progress | None = None,
        scoring: Scoring | None = None,
    ) -> dict[str, GenerationResult]:
        """Decode all requests; results by sample id.

        Args:
            ledger: holds every sample as PENDING; they are FINISHED on return.
            scoring: takes finished samples, which are scored on devices of engines without samples. Some may still be
                on return; `finish_scoring` does the rest.

        Raises:
            RunError: an engine failed or lost a sample, one came back twice or unasked, or no engine could be revived.
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
        stage = Stage(work, reallocation, scoring)
        stage.given = {rank: self._engines.launches(rank) for rank in serving}
        while not work.done or stage.calls:  # an engine that waits for what ended elsewhere is heard out
            self._take_back(stage)
            if stage.idle:
                self._plan(stage)  # first: there may be samples for it, and else its device scores finished ones
            self._start_calls(stage)
            self._plan(stage)  # while all decode
            self._hear(stage, phase)
            if work.done:
                self._journal.end()
            if progress:
                progress(len(work.results), len(requests))
        if reallocation:
            reallocation.end()
            self._drop_copies(phase)
        return work.results

    def finish_scoring(self, scoring: Scoring, phase: str) -> None:
        """Have what waits scored. Raises RunError: a replica failed, or none is left."""
        while not scoring.done:
            scoring.go_on()
            for call in self._wait(scoring.calls(), phase, first=True, check=False):
                self._scored(scoring, call)
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

    def _drop_copies(self, phase: str) -> None:
        """Copies of prompts, and of samples whose move failed halfway, are now of no use to anyone."""
        calls = [self._engines.start(rank, "clear") for rank in self._engines.serving()]
        self._wait(calls, phase, first=False, check=False)

    def _plan(self, stage: Stage) -> None:
        """Let samples be reallocated if a plan is due."""
        work, reallocation = stage.work, stage.reallocation
        if reallocation is None or work.done or not reallocation.due(urgent=stage.idle):
            return
        stage.idle = False
        unscored = stage.scoring.queue.unscored_tokens if stage.scoring else None
        if reallocation.plan(work, self._engines.serving(), unscored):
            self._offer_freed(stage, reallocation)

    def _offer_freed(self, stage: Stage, reallocation: Reallocation) -> None:
        """After a plan, which gives an engine that has emptied new samples if there are any for it.

        Scoring comes first: training waits for it.
        """
        if self._freed_work and (stage.scoring is None or stage.scoring.done):
            self._freed_work.offer(self._busy(stage), reallocation.seconds_left)

    def _busy(self, stage: Stage) -> set[int]:
        """Engines with samples."""
        return {*stage.calls, *(rank for rank in self._engines.alive() if stage.work.has_work(rank))}

    def _start_calls(self, stage: Stage) -> None:
        """Have every engine that waits decode what there is for it, and what has ended scored where none does."""
        if stage.work.done:
            return
        for rank in self._engines.serving():
            if rank not in stage.calls and stage.work.has_work(rank):
                stage.given[rank] = self._engines.launches(rank)
                stage.calls[rank] = self._advance(rank, stage)
        if stage.scoring:
            stage.scoring.start(self._busy(stage))

    def _advance(self, rank: int, stage: Stage) -> EngineCall:
        """Begin to hand over what is queued for an engine, and to decode."""
        work = stage.work
        samples = work.take(rank)
        self._journal.live(rank, work.held(rank))
        if stage.reallocation is None:
            return self._engines.start(rank, "advance", samples, self._poll_seconds)
        stage.cut[rank] = work.travels.open_sources(rank)
        orders = stage.reallocation.orders(rank, work)
        return self._engines.start(rank, "advance", samples, self._poll_seconds, orders)

    def _hear(self, stage: Stage, phase: str) -> None:
        """Wait for the next answers and file them; without any call in flight, for an engine that serves."""
        if not stage.calls and not self._engines.serving():
            self._revive()
        elif not stage.calls:
            time.sleep(_PAUSE_SECONDS)  # a suspect engine holds what is left: it comes back or is given up
        scored = stage.scoring.calls() if stage.scoring else []
        for call in self._wait([*stage.calls.values(), *scored], phase, first=True, check=False):
            if stage.scoring and call in scored:
                self._scored(stage.scoring, call)
            else:
                self._file(call, stage)

    def _scored(self, scoring: Scoring, call: Any) -> None:
        """Take note of a replica's answer, or of its death."""
        if report := scoring.heard(call):
            self._journal.scored(report)

    def _file(self, call: EngineCall, stage: Stage) -> None:
        """Take note of an answer, or of its engine's death."""
        rank = call.rank
        del stage.calls[rank]
        if call.dead:
            stage.given.pop(rank, None)
            self._lose(rank, stage)
        else:
            self._decoded(rank, call.result(), stage)

    def _decoded(self, rank: int, report: EngineReport, stage: Stage) -> None:
        work, serving = stage.work, self._engines.serving()
        work.report(rank, report, serving)
        if stage.scoring:
            for result in report.finished:
                if work.results.get(result.sample_id) is result:
                    stage.scoring.add(work.known[result.sample_id].request, result)
        if stage.reallocation:
            work.cut(rank, stage.cut.pop(rank), serving)
            counting = [result for result in report.finished if work.results.get(result.sample_id) is result]
            self._journal.moved(stage.reallocation.note(rank, counting, report.migration.landings))
        stage.idle |= not work.has_work(rank)
        self._journal.decoded(rank, report.spans, work.held(rank))

    def _lose(self, rank: int, stage: Stage) -> None:
        stage.work.lose(rank, self._engines.serving())
        if stage.reallocation:
            stage.reallocation.lose(rank)
        self._journal.gone(rank)

    def _take_back(self, stage: Stage) -> None:
        """The work of engines that died between two calls, and of those that were away from the start."""
        alive, given = self._engines.alive(), stage.given
        for rank in sorted({*stage.work.holders(), *given}):
            there = rank in alive and given.get(rank, self._engines.launches(rank)) == self._engines.launches(rank)
            if not there and rank not in stage.calls:
                given.pop(rank, None)
                self._lose(rank, stage)


@dataclass
class Stage:
    """A rollout under way.

    Attributes:
        calls: in flight, by rank.
        given: by rank, the process that was given something.
        cut: by rank, dead engines whose messages its call in flight takes.
        idle: an engine has run out of samples, and no plan was made since.
    """

    work: Assignment
    reallocation: Reallocation | None
    scoring: Scoring | None
    calls: dict[int, EngineCall] = field(default_factory=dict)
    given: dict[int, int] = field(default_factory=dict)
    cut: dict[int, list[int]] = field(default_factory=dict)
    idle: bool = False
