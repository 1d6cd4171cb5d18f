"""Discrete-event simulation of one rollout: samples end or migrate, plans are made, and freed devices score."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhfspec_mega.planning.rollout_state import EngineState, Floats, Ints, RolloutPolicy, RolloutState
from rlhfspec_mega.rollout.shared_queue import SharedQueue
from rlhfspec_mega.simulate.curves import CostCurves, DecodeCurve
from rlhfspec_mega.simulate.scoring import Scoring
from rlhfspec_mega.simulate.simulated_engine import SAME_TOKEN, FluidEngine, Migration, Migrations, QueuedSample
from rlhfspec_mega.simulate.workload import Predictions, Workload


class LiveCounts:
    """Number of live samples of each engine over time, stored as changes in order of time."""

    def __init__(self, engines: int) -> None:
        self.engines = engines
        self._changes: list[tuple[float, int, int]] = []
        self._current = [0] * engines

    def note(self, now: float, engine: int, live: int) -> None:
        """Record that an engine has so many live samples from this time on."""
        if live != self._current[engine]:
            self._current[engine] = live
            self._changes.append((now, engine, live))

    def at(self, times: Sequence[float]) -> Ints:
        """Numbers of live samples [times, engines] after all changes up to each time; times are ascending."""
        counts = np.zeros((len(times), self.engines), np.int64)
        current = np.zeros(self.engines, np.int64)
        changes = iter([*self._changes, (np.inf, 0, 0)])
        change = next(changes)
        for row, moment in enumerate(times):
            while change[0] <= moment:
                current[change[1]] = change[2]
                change = next(changes)
            counts[row] = current
        return counts


@dataclass(frozen=True)
class SimulatedRollout:
    """The result of one simulated rollout and of the scoring of its samples.

    Attributes:
        makespan: seconds until the last sample ended.
        makespan_with_scoring: seconds until the reference had scored all samples.
        freed_device_seconds: sum over engines of the seconds from their last sample to the end of the rollout.
        used_device_seconds: spent on inference tasks before the rollout ended, including any overlap with samples that
            arrived during a task.
        fused_tasks: inference tasks that began before the rollout ended.
        migrations: moves of started samples that arrived.
        overtaken: moves of started samples that ended before their copy was done.
        handed_over: moves of samples that had not started, which take no time.
        refused: planned moves that cannot be made: to a freed engine, of a migrating sample, or to the same engine.
        finished_at, ended_on: [samples] time in seconds, and engine.
        decoded: tokens gained on all engines.
        kv_peak: most tokens in the KV cache of one engine. The simulation does not enforce `CostCurves.kv_tokens`, so
            compare the two.
        live: numbers of live samples over time.
    """

    makespan: float
    makespan_with_scoring: float
    freed_device_seconds: float
    used_device_seconds: float
    fused_tasks: int
    migrations: int
    overtaken: int
    handed_over: int
    refused: int
    finished_at: Floats
    ended_on: Ints
    decoded: float
    kv_peak: float
    live: LiveCounts


class Rollout:
    """Simulates one rollout; may be run once.

    Args:
        curves: costs, apart from decoding.
        curve: the decode curve of the engines, one of those in `curves`.
        places: [samples] engine that each sample is meant for.
        on_demand: an engine begins with as many of its samples as it has slots. The others are in one queue, and handed
            out in order as slots become free; meanwhile nothing is planned.
        policy: asked every `plan_seconds`; None: samples stay on their engines.
        predictions: of the remaining tokens, for `policy`.
        scoring: of this rollout's samples, with none scored yet.
        plan_seconds: simulated seconds between plans.
    """

    def __init__(
        self,
        workload: Workload,
        engines: int,
        curves: CostCurves,
        curve: DecodeCurve,
        places: Ints,
        on_demand: bool,
        policy: RolloutPolicy | None,
        predictions: Predictions,
        scoring: Scoring,
        plan_seconds: float,
    ) -> None:
        self.now = 0.0
        self._workload, self._curves, self._curve = workload, curves, curve
        self._policy, self._predictions, self._plan_seconds = policy, predictions, plan_seconds
        self._scoring = scoring
        self._engines = [
            FluidEngine(rank, curves.slots, curve, curves.prefill_seconds, curves.migration.copy_share)
            for rank in range(engines)
        ]
        count = len(workload.lengths)
        self._ids = tuple(str(sample) for sample in range(count))
        self._at = places.copy()
        self._left = workload.lengths.astype(np.float64)  # for samples without a slot; engines know those of the others
        self._totals = workload.totals
        self._finished_at = np.full(count, np.nan)
        self._unfinished = count
        self._queue = SharedQueue[int]()
        self._migrations, self._freed = Migrations(engines), set[int]()
        self._idle = set[int]()  # freed engines for which no sample was ready to score
        self._handed_over = self._refused = 0
        self._live = LiveCounts(engines)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0
        self._stamps = [0] * engines  # a scheduled end is ignored if its engine's stamp has changed since
        self._assign_start(on_demand)

    def run(self) -> SimulatedRollout:
        """Simulate until the last sample has ended, and then the remaining scoring."""
        if self._policy is not None:
            self._policy.begin()
            self._schedule(self._plan_seconds, self._plan)
        while self._unfinished:
            self.now, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)
        freed = sum(self.now - engine.last_held for engine in self._engines)
        return SimulatedRollout(
            makespan=self.now,
            makespan_with_scoring=self._scoring.finish_time(self.now),
            freed_device_seconds=freed,
            used_device_seconds=self._scoring.seconds_before(self.now),
            fused_tasks=self._scoring.tasks,
            migrations=self._migrations.done,
            overtaken=self._migrations.overtaken,
            handed_over=self._handed_over,
            refused=self._refused,
            finished_at=self._finished_at,
            ended_on=self._at,
            decoded=sum(engine.decoded for engine in self._engines),
            kv_peak=max(engine.kv_peak for engine in self._engines),
            live=self._live,
        )

    # Samples and engines

    def _assign_start(self, on_demand: bool) -> None:
        for sample, place in enumerate(self._at.tolist()):
            engine = self._engines[place]
            if on_demand and _held(engine) >= engine.slots:
                self._queue.extend(int(self._workload.groups[sample]), [sample])
            else:
                self._enqueue(engine, sample)
        for engine in self._engines:
            self._update(engine)

    def _enqueue(self, engine: FluidEngine, sample: int, with_kv: bool = False) -> None:
        """Queue a sample at an engine; the caller must call `_update` afterwards."""
        engine.advance(self.now)
        self._at[sample] = engine.rank
        prefill = 0 if with_kv else int(self._workload.prompts[sample])
        group, left, total = int(self._workload.groups[sample]), float(self._left[sample]), float(self._totals[sample])
        engine.take(QueuedSample(sample, group, left, total, prefill))

    def _update(self, engine: FluidEngine) -> None:
        """Admit samples, schedule the next end and start scoring, after an engine's samples or pace have changed.

        The engine must have been advanced to the current time.
        """
        while self._queue and _held(engine) < engine.slots:
            self._enqueue(engine, self._queue.take(engine.rank))
        engine.admit()
        self._live.note(self.now, engine.rank, len(engine.live))
        self._stamps[engine.rank] += 1
        end = engine.next_end()
        if end is not None:
            self._schedule(end, self._end, engine, self._stamps[engine.rank])
        self._score(engine)

    def _end(self, engine: FluidEngine, stamp: int) -> None:
        """Event: the next samples of an engine end."""
        if stamp != self._stamps[engine.rank]:
            return
        for sample in engine.end(self.now):
            self._finished_at[sample] = self.now
            self._unfinished -= 1
            self._predictions.finished(sample, int(self._workload.lengths[sample]))
            self._scoring.add(sample)
            if sample in self._migrations.under_way:
                self._overtake(sample, engine)
        self._copy_next(engine.rank)  # after all ends, because the next sample to be copied may have ended too
        self._update(engine)
        while self._idle and self._scoring.waiting:
            rank = min(self._idle)
            self._idle.remove(rank)
            self._score(self._engines[rank])

    # Plans

    def _plan(self) -> None:
        assert self._policy is not None
        self._schedule(self.now + self._plan_seconds, self._plan)
        if self._queue:
            return
        state = self._state()
        self._scoring.expect(float((state.lengths + state.remaining).sum()))
        unfinished = np.flatnonzero(np.isnan(self._finished_at)).tolist()
        plan = self._policy.plan(state)
        self._freed = set(plan.freed)
        for move in plan.moves:
            self._move(unfinished[move.sample], self._engines[move.destination])

    def _state(self) -> RolloutState:
        """The state as a policy may know it, without the true lengths."""
        left = self._left.copy()
        for engine in self._engines:
            engine.advance(self.now)
            if engine.live:
                samples = np.fromiter(engine.live, np.int64, len(engine.live))
                left[samples] = np.fromiter(engine.live.values(), np.float64, len(samples)) - engine.level
        unfinished = np.flatnonzero(np.isnan(self._finished_at))
        generated = np.floor(self._workload.lengths[unfinished] - left[unfinished] + SAME_TOKEN).astype(np.int64)
        lengths = self._workload.prompts[unfinished] + generated
        throughput = self._curve.throughput(float(lengths.mean()))
        under_way = np.fromiter(self._migrations.under_way, np.int64)
        return RolloutState(
            now=self.now,
            engines=tuple(
                EngineState(engine.rank, engine.slots, self._curves.kv_tokens, throughput) for engine in self._engines
            ),
            ids=tuple(self._ids[sample] for sample in unfinished.tolist()),
            at=self._at[unfinished],
            groups=self._workload.groups[unfinished],
            generated=generated,
            lengths=lengths,
            remaining=self._predictions.remaining(unfinished, generated),
            movable=~np.isin(unfinished, under_way),
        )

    # Migrations

    def _move(self, sample: int, destination: FluidEngine) -> None:
        """Make a planned move; one that cannot be made is counted and skipped, as in a real run."""
        source = self._engines[self._at[sample]]
        if source is destination or destination.rank in self._freed or sample in self._migrations.under_way:
            self._refused += 1
        elif sample in source.waiting and source.waiting[sample].prefill:
            source.withdraw(sample)
            self._handed_over += 1
            self._enqueue(destination, sample)
            self._update(destination)
        else:
            self._at[sample] = destination.rank
            self._migrations.add(sample, source.rank, destination.rank)
            self._copy_next(source.rank)

    def _copy_next(self, source: int) -> None:
        """Start the next stage-one copy of an engine that is not making one."""
        migration = self._migrations.next_copy(source)
        if migration is None:
            return
        self._copying(migration, +1)
        tokens = float(self._totals[migration.sample]) - self._engines[source].left(migration.sample)
        begin = max(self.now, self._engines[source].reading_until)  # of a prompt that is being read there is no KV yet
        self._schedule(begin + tokens * self._curves.migration.copy_seconds, self._copied, migration)

    def _overtake(self, sample: int, source: FluidEngine) -> None:
        """Cancel the migration of a sample that ended at its source before the copy was done."""
        self._at[sample] = source.rank
        migration, was_copied = self._migrations.overtake(sample)
        if was_copied:
            self._copying(migration, -1)
        self._score(self._engines[migration.destination])

    def _copying(self, migration: Migration, more: int) -> None:
        """Start (+1) or end (-1) a copy, which changes the pace of both engines."""
        for rank in (migration.source, migration.destination):
            engine = self._engines[rank]
            engine.advance(self.now)
            engine.copies += more
            self._update(engine)

    def _copied(self, migration: Migration) -> None:
        """Event: stage one is done, and the sample leaves its source."""
        if migration.cancelled:
            return
        source = self._engines[migration.source]
        source.advance(self.now)
        self._left[migration.sample] = source.withdraw(migration.sample)
        self._migrations.copied(migration)
        self._copying(migration, -1)
        self._schedule(self.now + self._curves.migration.downtime, self._arrive, migration)
        self._copy_next(migration.source)

    def _arrive(self, migration: Migration) -> None:
        """Event: stage two is done, and the sample continues at its destination."""
        self._migrations.arrive(migration)
        destination = self._engines[migration.destination]
        self._enqueue(destination, migration.sample, with_kv=True)
        self._update(destination)

    # Inference tasks

    def _score(self, engine: FluidEngine) -> None:
        """Score a finished sample if this engine has no samples and expects none."""
        rank = engine.rank
        if not self._scoring.fused or not self._unfinished or not engine.empty or self._migrations.incoming[rank]:
            return
        if not self._scoring.busy(rank, self.now):
            until = self._scoring.begin(rank, self.now)
            if until is None:
                self._idle.add(rank)
            else:
                self._schedule(until, self._score, engine)

    def _schedule(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (time, self._scheduled, action, arguments))
        self._scheduled += 1


def _held(engine: FluidEngine) -> int:
    return len(engine.live) + len(engine.waiting)
