"""Consolidation: when, and onto how many engines, the long tail is packed so that the others' devices can work;
and the policy of a rollout that does so once reallocation has nothing to gain."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from rlhfspec_mega.planning.reallocation import Reallocator
from rlhfspec_mega.planning.rollout_state import Floats, Ints, MigrationCost, Move, Plan, RolloutState
from rlhfspec_mega.planning.throughput import Decay, batch_seconds

LATER = (0.8, 0.65, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05)  # shares of now's unfinished samples: moments looked ahead to
MOST_COUNTS = 24  # of engines kept, tried at each moment
WORTH_WAITING = 0.98  # of now's gain, if it can be had later too: then fewer samples move, and more is known of them
ALIKE = 0.98  # of the best gain now, for a number of engines with which fewer samples move
TRIES = 3  # packings worked out in full before it is left for another time


class Consolidator:
    """RLHFuse's inter-stage fusion: with R_t samples unfinished, they are packed onto m engines (arXiv 2409.13221).

    What counts is when both the rollout and the inference tasks on its samples (reference scoring) are done. Devices
    that are freed early take from the work that all devices would have to do afterwards, as long as there is some.
    The decay of the predicted remaining lengths is simulated for several R_t from now on, and for numbers m of engines;
    the rollout's own end may come later by `tolerance` at most, and a sample's tasks wait for its end. If no later
    moment is as good as now, now it is; asked again and again, the decision follows the lengths as they drift. A tail
    that was packed is packed further when it has shrunk.

    The engines kept are those with most of the remaining work, so few samples move: each of the others' goes to one of
    the engines that end first, the longest first.

    Args:
        cost: of a move; may be replaced when it is known better.
        tolerance: share of the time to the end of the rollout by which that may be delayed.
        least_gain: share of the time to the end of rollout and inference tasks that is to be gained.
    """

    def __init__(self, cost: MigrationCost, *, tolerance: float = 0.03, least_gain: float = 0.01) -> None:
        self.cost = cost
        self._tolerance, self._least_gain = tolerance, least_gain
        self.begin()

    def begin(self) -> None:
        """A new rollout begins."""
        self._samples, self._work_seconds = 0, 0.0  # of the whole rollout, as seen when it began

    def observe(self, samples: int, work_seconds: float) -> None:
        """What is unfinished now, and the inference work that waits: the first time of a rollout, all there is."""
        if samples > self._samples:
            self._samples, self._work_seconds = samples, work_seconds

    def plan(self, state: RolloutState, freed: Collection[int], work_seconds: float) -> Plan | None:
        """Moves that empty some engines, and all freed ones, those that were included; None: not now.

        Args:
            freed: engines (indices) that were freed before.
            work_seconds: of one device, for the inference tasks of this rollout that are still to be done.
        """
        self.observe(len(state.ids), work_seconds)
        open_engines = np.setdiff1d(np.arange(len(state.engines)), list(freed))
        present = np.flatnonzero(np.isin(state.at, open_engines))
        if work_seconds <= 0.0 or len(open_engines) < 2 or len(present) == 0:
            return None
        case = _Case(state, open_engines, present, self.cost, work_seconds, self._work_seconds / self._samples)
        latest = (1.0 + self._tolerance) * case.end
        now = case.gains(len(present), latest)
        enough = self._least_gain * case.total(case.end, 0.0, len(open_engines))
        promised = max(now.values(), default=0.0)
        for count in sorted({int(share * len(present)) for share in LATER} - {0}, reverse=True):
            if promised <= enough:
                return None
            enough = max([enough, *(gain / WORTH_WAITING for gain in case.gains(count, latest).values())])
        alike = [m for m, gain in now.items() if gain > enough and gain >= ALIKE * promised]
        for kept in sorted(alike, reverse=True)[:TRIES]:  # the more are kept, the fewer samples move
            packed = case.pack(kept)
            if packed and packed.end <= latest and case.gain(packed.end, 0.0, kept) > enough:
                return Plan(packed.moves, tuple(sorted({*freed, *packed.emptied})))
        return None


@dataclass(frozen=True)
class _Packed:
    """A packing worked out: what moves, which engines have nothing left, and seconds until the rollout ends."""

    moves: tuple[Move, ...]
    emptied: tuple[int, ...]
    end: float


class _Case:
    """One state's open engines, now and later, if nothing else is moved.

    Attributes:
        end: seconds until the rollout ends.
    """

    def __init__(
        self,
        state: RolloutState,
        open_engines: Ints,
        present: Ints,
        cost: MigrationCost,
        work_seconds: float,
        seconds_each: float,
    ) -> None:
        self._state, self._open, self._present, self._cost = state, open_engines, present, cost
        self._work_seconds = work_seconds
        self._decay = Decay(state.engines, state.at, state.remaining, present, spare=1)
        self._ends = self._decay.ends()
        self._last_ends_first = -np.sort(-self._ends[self._ends > 0.0])
        self.end = float(self._last_ends_first[0])
        # Moments on the way, and the work on the samples that have ended by then, done or not.
        unfinished = np.array([int(share * len(present)) for share in LATER])
        self._moments = self._last_ends_first[unfinished]
        self._ready = np.maximum(work_seconds - seconds_each * unfinished, 0.0)
        engines = [state.engines[i] for i in open_engines]
        self._slots, self._kv = min(e.slots for e in engines), min(e.kv_tokens for e in engines)
        curves = dict.fromkeys((e.throughput, e.slots) for e in engines)
        seconds = [batch_seconds(throughput, slots, self._slots) for throughput, slots in curves]
        self._weights = np.diff(np.max(seconds, axis=0))  # of the slowest engine
        self._final = np.append(state.lengths + state.remaining, 0.0)
        self._copied = np.append(np.where(state.generated > 0, state.lengths, 0), 0)
        # Samples that cannot be moved keep their engines.
        self._held = np.isin(open_engines, state.at[present[~state.movable[present]]])

    def total(self, end: float, start: float, kept: int) -> float:
        """Seconds until rollout and inference tasks are done.

        If the rollout ends at `end` and all open engines but `kept` work on the tasks from `start` on. Until any moment
        no more can be done than is ready.
        """
        devices = len(self._state.engines)
        before, more = devices - len(self._open), len(self._open) - kept
        still = before * (end - self._moments) + more * (end - np.maximum(self._moments, start))
        done = min(before * end + more * (end - start), float((self._ready + np.maximum(still, 0.0)).min()))
        return end + max(0.0, self._work_seconds - done) / devices

    def gain(self, end: float, start: float, kept: int) -> float:
        """Seconds gained against leaving everything as it is."""
        return self.total(self.end, 0.0, len(self._open)) - self.total(end, start, kept)

    def gains(self, count: int, latest: float) -> dict[int, float]:
        """Seconds gained by packing, once `count` samples are unfinished, by number of engines kept.

        Without those that slots or KV forbid, or with which the rollout ends after `latest`. Packing is estimated: all
        samples are dealt to the engines kept in turns, the longest first, and the first of these ends last, or one that
        does so anyway.
        """
        now = count == len(self._present)
        start = 0.0 if now else float(self._last_ends_first[count])
        progress = self._decay.progress(self._ends, start)[:, None]
        alive = self._ends > start
        left = np.where(alive, self._decay.remaining - progress, 0.0)
        who = self._decay.samples
        moving = np.where(alive, self._copied[who] + progress, 0.0).sum(axis=1)[self._open]
        order = self._by_work(left.sum(axis=1)[self._open], held_first=now)
        moving = moving[order]
        own_end = np.maximum.accumulate(self._decay.finish[self._open][order])  # kept engines keep what they have
        final = float(self._final[who][alive].sum())
        falling = -np.sort(-left[alive])
        least = int(self._held.sum()) if now else 1
        found = {}
        for kept in _numbers(max(least, 1), len(self._open) - 1):
            if len(falling) > kept * self._slots or final > kept * self._kv:
                continue
            longest = falling[::kept]
            copied = float(moving[kept:].sum())
            end = start + float(longest @ self._weights[: len(longest)]) + copied * self._cost.per_token / kept
            end = max(end + (self._cost.downtime if copied else 0.0), float(own_end[kept - 1]))
            if end <= latest:
                found[kept] = self.gain(end, start, kept)
        return found

    def pack(self, kept: int) -> _Packed | None:
        """Empty all engines but `kept` now: the longest sample first, to engines that end early; None if it fails."""
        state, cost = self._state, self._cost
        work = self._decay.remaining.sum(axis=1)[self._open]
        order = self._open[self._by_work(work, held_first=True)]
        stay = np.isin(state.at, order[:kept])
        leaving = self._present[~stay[self._present]]
        leaving = leaving[np.argsort(-state.remaining[leaving], kind="stable")]
        staying = self._present[stay[self._present]]
        decay = Decay(state.engines, state.at, state.remaining, staying, min(len(leaving), self._slots))
        kv_room = np.array([e.kv_tokens for e in state.engines]) - np.bincount(
            state.at[staying], self._final[staying], len(state.engines)
        )
        slots = np.array([e.slots for e in state.engines])
        extra = np.zeros(len(slots))  # seconds of copying
        moves: list[Move] = []
        while len(leaving):
            ready = order[:kept]
            ready = ready[(decay.counts[ready] < slots[ready]) & (kv_room[ready] >= self._final[leaving[0]])]
            if len(ready) == 0:
                return None
            ready = ready[np.argsort((decay.finish + extra)[ready], kind="stable")][: (kept + 1) // 2]
            samples = leaving[: len(ready)]
            fits = self._final[samples] <= kv_room[ready[: len(samples)]]
            samples, ready = samples[fits], ready[: len(samples)][fits]
            decay.put_in(ready, samples)
            kv_room[ready] -= self._final[samples]
            extra[ready] += self._copied[samples] * cost.per_token
            moves += [Move(int(i), int(e)) for i, e in zip(samples, ready, strict=True)]
            leaving = leaving[~np.isin(leaving, samples)]
        downtime = cost.downtime if any(self._copied[move.sample] for move in moves) else 0.0
        return _Packed(tuple(moves), tuple(order[kept:].tolist()), float((decay.finish + extra).max()) + downtime)

    def _by_work(self, work: Floats, held_first: bool) -> Ints:
        """Open engines (places in `open_engines`), those with most work first."""
        return np.lexsort((-work, ~self._held)) if held_first else np.argsort(-work, kind="stable")


def _numbers(least: int, most: int) -> list[int]:
    """Whole numbers from `least` to `most`: all, or `MOST_COUNTS` at equal ratios."""
    if most - least < MOST_COUNTS:
        return list(range(least, most + 1))
    return sorted(set(np.rint(np.geomspace(least, most, MOST_COUNTS)).astype(int).tolist()))


class TailPolicy:
    """Sample reallocation; when that has nothing to gain, consolidation. Implements `RolloutPolicy`.

    `Plan.freed` names all engines freed in this rollout so far, by their indices in the state given. Nothing moves to
    them. One that has samples all the same takes part again: a move from it came to nothing, or it was given those of
    an engine that died; and so do all if no other engine is left.

    Args:
        reallocator, consolidator: None switches it off.
        work_seconds: device-seconds of inference tasks on this rollout's samples that are still to be done, on those
            that have ended and those that have not; asked at every plan.
    """

    def __init__(
        self,
        reallocator: Reallocator | None,
        consolidator: Consolidator | None = None,
        work_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._reallocator, self._consolidator, self._work_seconds = reallocator, consolidator, work_seconds
        self._freed: set[int] = set()  # ranks: indices change when an engine dies

    def learn_cost(self, cost: MigrationCost) -> None:
        """What a move costs, as known now."""
        for part in (self._reallocator, self._consolidator):
            if part:
                part.cost = cost

    def begin(self) -> None:
        """A new rollout begins: all engines serve."""
        self._freed.clear()
        if self._reallocator:
            self._reallocator.begin()
        if self._consolidator:
            self._consolidator.begin()

    def plan(self, state: RolloutState) -> Plan:
        """Moves of now, and all engines freed so far."""
        self._freed -= {state.engines[i].rank for i in np.unique(state.at)}
        freed = tuple(i for i, engine in enumerate(state.engines) if engine.rank in self._freed)
        if len(freed) == len(state.engines):
            self._freed.clear()
            freed = ()
        work_seconds = self._work_seconds()
        if self._consolidator:
            self._consolidator.observe(len(state.ids), work_seconds)
        if self._reallocator and (moves := self._reallocator.plan(state, freed)):
            return Plan(moves, freed)
        if self._consolidator and (plan := self._consolidator.plan(state, freed, work_seconds)):
            self._freed |= {state.engines[i].rank for i in plan.freed}
            return plan
        return Plan((), freed)
