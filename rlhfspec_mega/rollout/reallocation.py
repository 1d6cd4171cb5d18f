"""Reallocation of samples between engines during a rollout: shows a policy the state and carries out its plans."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlhfspec_mega.planning.lengths import LengthPredictor
from rlhfspec_mega.planning.rollout_state import EngineState, MigrationCost, RolloutPolicy, RolloutState
from rlhfspec_mega.planning.throughput import Decay
from rlhfspec_mega.rollout.assignment import Assignment
from rlhfspec_mega.rollout.migration.lines import DriverLines
from rlhfspec_mega.rollout.migration.messages import MigrationOrder, MigrationOrders, PeerInfo
from rlhfspec_mega.types import GenerationRequest, GenerationResult, Landing, MigrationEvent

FIRST_DOWNTIME = 0.02  # seconds, before the first measurement
# As many times the usual downtime count at most, for all migrations of a report, which may have waited for the same:
# slow ones would otherwise be the last ones of a run.
MOST_TIMES_USUAL = 4.0
NEWEST_WEIGHT = 0.1  # of the newest value in the moving averages of downtime and of the time of a plan
PLAN_SHARE = 0.01  # share of the driver's time that plans may take: it may share its cores with engines
URGENT_SHARE = 0.2  # the same while an engine is idle, which costs more
LONGEST_WAIT = 0.2  # seconds for which such a plan waits for reports that were asked for
FRESH = 0.02  # seconds since an engine's last report in which it is not asked for another one
# After plans in a row that changed nothing, the next one comes 2, 4, then 8 times as late, but at most these seconds
# later.
MOST_PATIENCE, MOST_SECONDS_LATER = 8, 0.5


@dataclass
class ScoringWork:
    """What the reference still has to score of a rollout's samples, finished or not.

    Attributes:
        tokens: prompt and response tokens to score, unfinished samples at their predicted length.
        seconds_per_token: time on one device; 0 while it is unknown, or if nothing is scored.
    """

    tokens: int = 0
    seconds_per_token: float = 0.0

    def seconds(self) -> float:
        """Time that all of it takes on one device."""
        return self.tokens * self.seconds_per_token


class Reallocation:
    """The driver's side of sample reallocation, for one rollout after another.

    Args:
        plan_seconds: least time between two plans that are not urgent; longer if plans are slow, see PLAN_SHARE.
        learn_cost: called at the start of a rollout with the measured cost of migrations.

    Attributes:
        scoring: the scoring that freed engines can do; the policy reads it.
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
        self._downtime, self._landed = FIRST_DOWNTIME, True  # whether a sample with tokens has moved in this rollout
        self._lines = DriverLines()
        self._asked: set[int] | None = None  # engines whose reports an urgent plan waits for
        self._asked_at = 0.0
        self._heard: dict[int, float] = {}  # when each engine reported last
        self._plan_cost = 0.0  # seconds of the driver's CPU time per plan, moving average
        self._patience = 1  # see MOST_PATIENCE; kept from one rollout to the next

    def begin(self, requests: Sequence[GenerationRequest], peers: Mapping[int, PeerInfo]) -> None:
        """Start a rollout of these samples; `peers`: what each participating engine says of itself, by rank."""
        self._group: dict[str, int] = {}  # number of each sample's group, by sample id
        self._numbers: dict[str, int] = {}  # numbers of the groups, by group id
        self._lengths.begin()
        self.add(requests)
        self._policy.begin()
        self._peers = dict(peers)
        self._lines.open(peer.address for peer in peers.values())
        self._names = {peer.address.name: rank for rank, peer in peers.items()}
        self._orders: dict[int, list[MigrationOrder]] = {}
        self._begun = time.monotonic()
        self._schedule(self._begun)
        self._next_urgent = self._begun
        self._freed: tuple[int, ...] = ()
        self._asked = None
        self._heard.clear()
        self._state: RolloutState | None = None
        if not self._landed:  # the average would stay for ever if it were what keeps samples from moving
            self._downtime += NEWEST_WEIGHT * (FIRST_DOWNTIME - self._downtime)
        self._landed = False
        copying = [peer.copy_seconds for peer in peers.values()]
        reading = [peer.prefill_seconds for peer in peers.values() if math.isfinite(peer.prefill_seconds)]
        copy, prefill = (sum(seconds) / max(len(seconds), 1) for seconds in (copying, reading))
        self._learn_cost(MigrationCost(self._downtime, copy, prefill))

    def participants(self) -> Sequence[int]:
        """Ranks of the engines that take part in migrations."""
        return list(self._peers)

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Add samples to the rollout."""
        prompts = {request.group_id: str(hash(request.prompt_tokens)) for request in requests}
        fresh = [group for group in prompts if group not in self._numbers]
        for group in fresh:
            self._numbers[group] = len(self._numbers)
        self._group |= {request.sample_id: self._numbers[request.group_id] for request in requests}
        self._lengths.add([prompts[group] for group in fresh])

    def orders(self, rank: int, work: Assignment) -> MigrationOrders | None:
        """The orders that go to an engine with its next call; None for one that joined after the rollout began."""
        if rank not in self._peers:
            return None
        dead = set(work.custody.open_sources(rank))
        return MigrationOrders(
            moves=self._take_orders(rank, work),
            dead_sources=[name for name, source in self._names.items() if source in dead],
            expected=work.custody.expected(rank),
        )

    def send_orders(self, ranks: Collection[int], work: Assignment) -> None:
        """Send the last plan's orders to those of these engines that have some: they decode, and need not answer."""
        for rank in [rank for rank in self._orders if rank in ranks]:
            orders = self._take_orders(rank, work)
            if orders and not self._lines.order(self._peers[rank].address, orders):
                self._orders[rank] = orders

    def _take_orders(self, rank: int, work: Assignment) -> list[MigrationOrder]:
        """The orders that an engine has not got, without those that have become void."""
        orders = list[MigrationOrder]()
        for order in self._orders.pop(rank, []):
            if self._names[order.destination.name] not in self._peers:
                work.custody.kept(order.sample_id)  # the destination has died
            elif order.sample_id not in work.results:
                orders.append(order)
        return orders

    def record(
        self, rank: int, finished: Sequence[GenerationResult], landings: Sequence[Landing]
    ) -> list[MigrationEvent]:
        """Learn from an engine's report: finished samples that count, and samples that migrated to it.

        Returns:
            the completed migrations to this engine.
        """
        self._answered(rank)
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
        most = MOST_TIMES_USUAL * max(self._downtime, FIRST_DOWNTIME)
        for event in events:
            if event.begun:
                self._landed = True
                self._downtime += NEWEST_WEIGHT * (min(max(event.downtime, 0.0), most) - self._downtime)
        return events

    def lose(self, rank: int) -> None:
        """Remove an engine that has died."""
        self._answered(rank)
        self._peers.pop(rank, None)
        self._orders.pop(rank, None)
        self._patience = 1

    def due(self, urgent: bool) -> bool:
        """Whether it is time for a plan; `urgent`: an engine has run out of samples, so that a plan is due earlier."""
        return time.monotonic() >= (self._next_urgent if urgent else self._next_plan)

    def ask_reports(self, decoding: Collection[int]) -> set[int]:
        """Ask those of these engines that have not reported just now for a report; returns which have been reached."""
        oldest = time.monotonic() - FRESH
        ranks = [rank for rank in decoding if rank in self._peers and self._heard.get(rank, 0.0) <= oldest]
        return {rank for rank in ranks if self._lines.ask(self._peers[rank].address)}

    def awaits_reports(self, decoding: Collection[int]) -> bool:
        """Whether an urgent plan waits for reports: what is known is old, so engines that decode are asked for one."""
        if self._asked is None:
            self._asked, self._asked_at = self.ask_reports(decoding), time.monotonic()
        return bool(self._asked) and time.monotonic() < self._asked_at + LONGEST_WAIT

    def _answered(self, rank: int) -> None:
        self._heard[rank] = time.monotonic()
        if self._asked:
            self._asked.discard(rank)

    def plan(self, work: Assignment, serving: Iterable[int], unscored_tokens: int | None) -> bool:
        """Let the policy make a plan; its orders go out by `send_orders` or with the next calls of the source engines.

        Args:
            serving: ranks of the engines that take work.
            unscored_tokens: tokens of finished samples that are not scored yet; None if nothing is to be scored.

        Returns:
            whether the policy was asked: there are unfinished samples and more than one engine.
        """
        now, begun = time.monotonic(), time.thread_time()
        self._asked = None
        ranks = [rank for rank in serving if rank in self._peers]
        state = self._state = self._state_of(work, ranks, now - self._begun)
        decides = bool(state.ids) and len(ranks) > 1
        if decides:
            self._decide(state, ranks, work, unscored_tokens)
        self._plan_cost += NEWEST_WEIGHT * (time.thread_time() - begun - self._plan_cost)
        self._schedule(now)
        return decides

    def _schedule(self, now: float) -> None:
        """Set when the next plan is due."""
        self._next_plan = now + max(self._plan_seconds, self._gap(PLAN_SHARE))
        self._next_urgent = now + self._gap(URGENT_SHARE)

    def _gap(self, share: float) -> float:
        """Seconds between two plans that may take this share of the driver's time."""
        seconds = self._plan_cost / share
        return seconds + min((self._patience - 1) * seconds, MOST_SECONDS_LATER)

    def seconds_left(self) -> float:
        """Predicted time until the rollout ends, from the state at the last plan; 0 before the first plan."""
        state = self._state
        if state is None or not state.ids:
            return 0.0
        decay = Decay(state.engines, state.at, state.remaining, np.arange(len(state.ids)), spare=1)
        return max(0.0, float(decay.finish.max()) - (time.monotonic() - self._begun - state.now))

    def _decide(self, state: RolloutState, ranks: Sequence[int], work: Assignment, unscored_tokens: int | None) -> None:
        unfinished = int((state.lengths + state.remaining).sum())
        self.scoring.tokens = 0 if unscored_tokens is None else unscored_tokens + unfinished
        plan = self._policy.plan(state)
        changes = len(plan.moves) > 0 or plan.freed != self._freed
        self._freed = plan.freed
        self._patience = 1 if changes else min(2 * self._patience, MOST_PATIENCE)
        for move in plan.moves:
            sample_id, destination = state.ids[move.sample], ranks[move.destination]
            source, peer = ranks[state.at[move.sample]], self._peers[destination]
            number = work.custody.order(sample_id, source, destination)
            order = MigrationOrder(number, sample_id, peer.address, peer.prefill_seconds)
            self._orders.setdefault(source, []).append(order)

    def end(self) -> None:
        """End the rollout."""
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
            EngineState(rank, peer.slots, peer.kv_tokens, peer.throughput)
            for rank in ranks
            for peer in [self._peers[rank]]
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
