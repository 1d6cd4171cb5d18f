"""Hands samples to engines, collects them as they finish, and accounts for every one of them, whatever dies."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlhfspec_mega.ledger import Ledger
from rlhfspec_mega.observe.timeline import Timeline
from rlhfspec_mega.rollout.assignment import Assignment
from rlhfspec_mega.rollout.fusion import ScoringQueue
from rlhfspec_mega.rollout.journal import Journal
from rlhfspec_mega.rollout.migration.messages import Meeting
from rlhfspec_mega.rollout.reallocation import Reallocation
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
        scored_at_once: tokens that an engine scores before it answers.
        timeline: is told what the engines do.
        freed_work: is offered freed engines' time after all finished samples are scored; with `reallocation`, which
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
        scored_at_once: int = 1024,
        timeline: Timeline | None = None,
        freed_work: FreedWork | None = None,
    ) -> None:
        self._engines, self._wait, self._revive = engines, wait, revive
        self._poll_seconds, self._deterministic, self._at_once = poll_seconds, deterministic, at_once
        self._reallocation, self._scored_at_once = reallocation, scored_at_once
        self._journal, self._freed_work = Journal(timeline), freed_work
        self._left: Stage | None = None  # engines that went on scoring when a rollout was over

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        ledger: Ledger,
        phase: str,
        progress: Progress | None = None,
        scoring: ScoringQueue | None = None,
    ) -> dict[str, GenerationResult]:
        """Decode all requests; results by sample id.

        Args:
            ledger: holds every sample as PENDING; they are FINISHED on return.
            scoring: takes finished samples; engines without samples score them. Some may still do so on return, and
                can be asked for nothing before `finish_scoring`, which does the rest.

        Raises:
            RunError: an engine failed or lost a sample, one came back twice or unasked, or no engine could be revived.
        """
        serving, self._left = self._engines.serving(), None  # those of a step that was given up
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
        while not work.done or stage.decoding:  # an engine that waits for what ended elsewhere is heard out
            self._take_back(stage)
            if stage.idle:
                self._plan(stage)  # first: there may be samples for it, and else it is given finished ones to score
            self._start_calls(stage)
            self._plan(stage)  # while all decode
            self._hear(stage, phase)
            if work.done:
                self._journal.end()
            if progress:
                progress(len(work.results), len(requests))
        if reallocation:
            reallocation.end()
            self._drop_copies(phase, set(range(self._engines.size)) - stage.calls.keys())
        if stage.calls:
            self._left = Stage(None, reallocation, scoring, stage.calls, stage.given)
        return work.results

    def finish_scoring(self, scoring: ScoringQueue, phase: str) -> None:
        """Have all engines score what waits. Raises RunError as `generate` does."""
        stage, self._left = self._left or Stage(None, None, scoring), None
        uncleared = list(stage.calls)
        while not scoring.done:
            self._take_back(stage)
            self._start_calls(stage)
            self._hear(stage, phase)
        if stage.reallocation:
            self._drop_copies(phase, uncleared)
        if self._reallocation and scoring.scored_tokens:
            self._reallocation.scoring.seconds_per_token = scoring.seconds / scoring.scored_tokens

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

    def _drop_copies(self, phase: str, ranks: Collection[int]) -> None:
        """Copies of prompts, and of samples whose move failed halfway, are now of no use to anyone."""
        calls = [self._engines.start(rank, "clear") for rank in self._engines.serving() if rank in ranks]
        self._wait(calls, phase, first=False, check=False)

    def _plan(self, stage: Stage) -> None:
        """Let samples be reallocated if a plan is due."""
        work, reallocation = stage.work, stage.reallocation
        if work is None or reallocation is None or work.done or not reallocation.due(urgent=stage.idle):
            return
        stage.idle = False
        unscored = stage.scoring.unscored_tokens if stage.scoring else None
        if reallocation.plan(work, self._engines.serving(), unscored):
            self._offer_freed(work, stage, reallocation)

    def _offer_freed(self, work: Assignment, stage: Stage, reallocation: Reallocation) -> None:
        """After a plan, which gives an engine that has emptied new samples if there are any for it.

        Scoring comes first: training waits for it.
        """
        if self._freed_work and (stage.scoring is None or stage.scoring.done):
            busy = {*stage.calls, *(rank for rank in self._engines.alive() if work.has_work(rank))}
            self._freed_work.offer(busy, reallocation.seconds_left)

    def _start_calls(self, stage: Stage) -> None:
        """Give every engine that waits what there is for it: samples first. Nothing once all samples have ended."""
        if stage.work and stage.work.done:
            return
        for rank in self._engines.serving():
            if rank in stage.calls:
                continue
            if stage.work and stage.work.has_work(rank):
                stage.given[rank] = self._engines.launches(rank)
                stage.calls[rank] = self._advance(rank, stage.work, stage)
            elif stage.scoring and (batch := stage.scoring.take(rank, self._scored_at_once)):
                stage.given[rank] = self._engines.launches(rank)
                stage.calls[rank] = self._engines.start(rank, "score", batch)

    def _advance(self, rank: int, work: Assignment, stage: Stage) -> EngineCall:
        """Begin to hand over what is queued for an engine, and to decode."""
        samples = work.take(rank)
        self._journal.live(rank, work.held(rank))
        if stage.reallocation is None:
            return self._engines.start(rank, "advance", samples, self._poll_seconds)
        stage.cut[rank] = work.travels.open_sources(rank)
        scores = stage.scoring.holders() if stage.scoring else ()
        orders = stage.reallocation.orders(rank, work, occupied=scores)
        return self._engines.start(rank, "advance", samples, self._poll_seconds, orders)

    def _hear(self, stage: Stage, phase: str) -> None:
        """Wait for the next answers and file them; without any call in flight, for an engine that serves."""
        if not stage.calls and not self._engines.serving():
            self._revive()
        elif not stage.calls:
            time.sleep(_PAUSE_SECONDS)  # a suspect engine holds what is left: it comes back or is given up
        for call in self._wait(list(stage.calls.values()), phase, first=True, check=False):
            self._file(call, stage)

    def _file(self, call: EngineCall, stage: Stage) -> None:
        """Take note of an answer, or of its engine's death."""
        rank = call.rank
        del stage.calls[rank]
        if call.dead:
            stage.given.pop(rank, None)
            self._lose(rank, stage)
        elif stage.scoring and rank in stage.scoring.holders():
            report = call.result()
            stage.scoring.report(rank, report)
            self._journal.scored(rank, report.span)
        elif stage.work:
            self._decoded(rank, call.result(), stage.work, stage)

    def _decoded(self, rank: int, report: EngineReport, work: Assignment, stage: Stage) -> None:
        serving = self._engines.serving()
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
        if stage.work:
            stage.work.lose(rank, self._engines.serving())
        if stage.reallocation:
            stage.reallocation.lose(rank)
        if stage.scoring:
            stage.scoring.lose(rank)
        self._journal.gone(rank)

    def _take_back(self, stage: Stage) -> None:
        """The work of engines that died between two calls, and of those that were away from the start."""
        alive, given = self._engines.alive(), stage.given
        holders = {*(stage.work.holders() if stage.work else ()), *(stage.scoring.holders() if stage.scoring else ())}
        holders |= given.keys()
        for rank in sorted(holders):
            there = rank in alive and given.get(rank, self._engines.launches(rank)) == self._engines.launches(rank)
            if not there and rank not in stage.calls:
                given.pop(rank, None)
                self._lose(rank, stage)


@dataclass
class Stage:
    """A rollout, or the scoring after it, under way.

    Attributes:
        calls: in flight, by rank.
        given: by rank, the process that was given something.
        cut: by rank, dead engines whose messages its call in flight takes.
        idle: an engine has run out of samples, and no plan was made since.
    """

    work: Assignment | None
    reallocation: Reallocation | None
    scoring: ScoringQueue | None
    calls: dict[int, EngineCall] = field(default_factory=dict)
    given: dict[int, int] = field(default_factory=dict)
    cut: dict[int, list[int]] = field(default_factory=dict)
    idle: bool = False

    @property
    def decoding(self) -> bool:
        """Whether an engine is still at samples, not at their scoring."""
        return not self.calls.keys() <= set(self.scoring.holders() if self.scoring else ())
