"""Moves samples between engines while a rollout runs: shows a policy the rollout, and carries out what it decides."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlhfspec_mega.planning.lengths import LengthPredictor
from rlhfspec_mega.planning.rollout_state import EngineState, MigrationCost, RolloutPolicy, RolloutState
from rlhfspec_mega.planning.throughput import Decay
from rlhfspec_mega.rollout.assignment import Assignment
from rlhfspec_mega.rollout.migration.messages import Meeting, MigrationOrder, Orders
from rlhfspec_mega.types import GenerationRequest, GenerationResult, Landing, MigrationEvent

FIRST_DOWNTIME = 0.02  # seconds, until it is measured
NEWEST = 0.1  # weight of the newest migration in the usual downtime, of the newest plan in their usual effort
PLAN_SHARE = 0.01  # of the driver's time may go into plans: where it shares its cores with engines, they pay for them
URGENT_SHARE = 0.2  # while an engine stands idle, which costs more


@dataclass
class ScoringWork:
    """What the reference has still to read of a rollout's samples, ended or not.

    Attributes:
        tokens: of prompts and responses.
        seconds_per_token: on one device; 0 until it is known, or if nothing is scored.
    """

    tokens: int = 0
    seconds_per_token: float = 0.0

    def seconds(self) -> float:
        """On one device."""
        return self.tokens * self.seconds_per_token


class Reallocation:
    """The driver's side of sample reallocation in one rollout after another.

    Args:
        plan_seconds: between two plans, at least, but for urgent ones; more where plans take long, see PLAN_SHARE.
        learn_cost: is told what migrations have cost lately.

    Attributes:
        scoring: what is to be done by engines that are freed; the policy reads it.
    """

    def __init__(
        self,
        policy: RolloutPolicy,
        lengths: LengthPredictor,
        plan_seconds: float,
        scoring: ScoringWork | None = None,
        learn_cost: Callable[[MigrationCost], None] = lambda cost: None,
    ) -> None:
        self._policy, self._lengths, self._plan_seconds = policy, lengths, plan_seconds
        self.scoring, self._learn_cost = scoring or ScoringWork(), learn_cost
        self._downtime = FIRST_DOWNTIME
        self._effort = 0.0  # seconds of the driver's time that a plan takes

    def begin(self, requests: Sequence[GenerationRequest], meetings: Mapping[int, Meeting]) -> None:
        """A rollout begins, of these samples, on engines that have told about themselves."""
        self._group: dict[str, int] = {}  # the number of each sample's group
        self._numbers: dict[str, int] = {}  # of groups
        self._lengths.begin()
        self.add(requests)
        self._policy.begin()
        self._meetings = dict(meetings)
        self._names = {meeting.address.name: rank for rank, meeting in meetings.items()}
        self._orders: dict[int, list[MigrationOrder]] = {}
        self._begun = time.monotonic()
        self._next_plan, self._next_urgent = self._begun + self._plan_seconds, self._begun
        self._state: RolloutState | None = None
        copying = [meeting.copy_seconds for meeting in meetings.values()]
        reading = [meeting.prefill_seconds for meeting in meetings.values() if math.isfinite(meeting.prefill_seconds)]
        copy, prefill = (sum(seconds) / max(len(seconds), 1) for seconds in (copying, reading))
        self._learn_cost(MigrationCost(self._downtime, copy, prefill))

    def met(self) -> Sequence[int]:
        """Engines that take part in migrations."""
        return list(self._meetings)

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """The rollout has these samples, too."""
        prompts = {request.group_id: str(hash(request.prompt_tokens)) for request in requests}
        fresh = [group for group in prompts if group not in self._numbers]
        for group in fresh:
            self._numbers[group] = len(self._numbers)
        self._group |= {request.sample_id: self._numbers[request.group_id] for request in requests}
        self._lengths.add([prompts[group] for group in fresh])

    def orders(self, rank: int, work: Assignment) -> Orders | None:
        """What to ask of an engine with the samples it is given now; None for one that came later."""
        if rank not in self._meetings:
            return None
        dead = set(work.custody.open_sources(rank))
        moves = list[MigrationOrder]()
        for order in self._orders.pop(rank, []):
            if self._names[order.destination.name] not in self._meetings:
                work.custody.kept(order.sample_id)  # it died meanwhile
            elif order.sample_id not in work.results:
                moves.append(order)
        return Orders(
            moves=moves,
            cut=[name for name, source in self._names.items() if source in dead],
            expects=work.custody.leads_to(rank),
        )

    def note(
        self, rank: int, finished: Sequence[GenerationResult], landings: Sequence[Landing]
    ) -> list[MigrationEvent]:
        """File results that count and samples that landed on an engine; the migrations to it."""
        for result in finished:
            self._lengths.finished(self._group[result.sample_id], len(result.tokens))
        events = [
            MigrationEvent(
                landing.sample_id,
                self._names[landing.source],
                rank,
                landing.departed,
                landing.arrived,
                landing.settled_bytes,
                landing.delta_bytes,
                landing.begun,
            )
            for landing in landings
        ]
        for event in events:
            if event.begun:
                self._downtime += NEWEST * (max(event.downtime, 0.0) - self._downtime)
        return events

    def lose(self, rank: int) -> None:
        """An engine died."""
        self._meetings.pop(rank, None)
        self._orders.pop(rank, None)

    def due(self, urgent: bool) -> bool:
        """Whether it is time for a plan; sooner if `urgent`: an engine has run out of samples."""
        return time.monotonic() >= (self._next_urgent if urgent else self._next_plan)

    def plan(self, work: Assignment, serving: Iterable[int], unscored_tokens: int | None) -> bool:
        """Let the policy decide; orders go out with the next calls of the sources.

        Args:
            unscored_tokens: of samples that have ended and were not scored; None if nothing is to be scored.

        Returns:
            Whether there was something to decide.
        """
        now, begun = time.monotonic(), time.thread_time()
        ranks = [rank for rank in serving if rank in self._meetings]
        state = self._state = self._state_of(work, ranks, now - self._begun)
        decides = bool(state.ids) and len(ranks) > 1
        if decides:
            self._decide(state, ranks, work, unscored_tokens)
        self._effort += NEWEST * (time.thread_time() - begun - self._effort)
        self._next_plan = now + max(self._plan_seconds, self._effort / PLAN_SHARE)
        self._next_urgent = now + self._effort / URGENT_SHARE
        return decides

    def seconds_left(self) -> float:
        """Until the rollout ends, as predicted from the last plan's state; 0 before the first plan."""
        state = self._state
        if state is None or not state.ids:
            return 0.0
        decay = Decay(state.engines, state.at, state.remaining, np.arange(len(state.ids)), spare=1)
        return max(0.0, float(decay.finish.max()) - (time.monotonic() - self._begun - state.now))

    def _decide(self, state: RolloutState, ranks: Sequence[int], work: Assignment, unscored_tokens: int | None) -> None:
        unfinished = int((state.lengths + state.remaining).sum())
        self.scoring.tokens = 0 if unscored_tokens is None else unscored_tokens + unfinished
        plan = self._policy.plan(state)
        for move in plan.moves:
            sample_id, destination = state.ids[move.sample], ranks[move.destination]
            source, meeting = ranks[state.at[move.sample]], self._meetings[destination]
            work.custody.order(sample_id, source, destination)
            self._orders.setdefault(source, []).append(
                MigrationOrder(sample_id, meeting.address, meeting.prefill_seconds)
            )

    def end(self) -> None:
        """The rollout is over."""
        self._lengths.end()

    def _state_of(self, work: Assignment, ranks: Sequence[int], now: float) -> RolloutState:
        index = {rank: number for number, rank in enumerate(ranks)}
        held = {i: index[rank] for i, rank in work.owners().items() if rank in index}
        ids = tuple(held)
        known = [work.known[sample_id] for sample_id in ids]
        generated = np.array([len(sample.tokens) for sample in known], np.int64)
        prompts = np.array([len(sample.request.prompt_tokens) for sample in known], np.int64)
        groups = np.array([self._group[sample_id] for sample_id in ids], np.int64)
        engines = tuple(
            EngineState(rank, meeting.slots, meeting.kv_tokens, meeting.throughput)
            for rank in ranks
            for meeting in [self._meetings[rank]]
        )
        going = {sample_id: work.custody.destination(sample_id) for sample_id in ids}
        at = [held[i] if (rank := going[i]) is None else index.get(rank, held[i]) for i in ids]
        return RolloutState(
            now=now,
            engines=engines,
            ids=ids,
            at=np.array(at, np.int64),
            groups=groups,
            generated=generated,
            lengths=prompts + generated,
            remaining=self._lengths.predict(groups, generated),
            movable=np.array([not work.custody.moves(i) for i in ids], np.bool_),
        )
