"""Consolidation of the long tail onto few engines, so that the other devices can score finished samples early; and the
rollout policy that tries it when reallocation has nothing to gain."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from rlhfspec_mega.planning.reallocation import Reallocator
from rlhfspec_mega.planning.rollout_state import Floats, Ints, MigrationCost, Move, Plan, RolloutState
from rlhfspec_mega.planning.throughput import Decay, batch_seconds

# Shares of the currently unfinished samples. Consolidation is also forecast for the later moments at which only these
# shares are left.
LOOKAHEAD_SHARES = (0.8, 0.65, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05)
MAX_ENGINE_COUNTS = 24  # numbers of kept engines that are tried at each moment
# Consolidation waits if a later moment offers this share of the current gain: fewer samples must move then, and their
# lengths are better known.
WORTH_WAITING = 0.98
NEARLY_BEST = 0.98  # share of the best current gain at which a number of kept engines is a candidate
MAX_PACKINGS = 3  # candidates whose moves are planned in detail before consolidation is given up for now


class Consolidator:
    """Inter-stage fusion: once R_t samples are left, moves them onto m engines (RLHFuse, arXiv 2409.13221).

    The objective is the time at which both the rollout and the inference tasks on its samples (reference scoring) are
    done. Freed devices do tasks during the rollout that all devices would otherwise share after it, as far as tasks are
    ready: a sample can be scored only once it is finished. The predicted remaining lengths give the decay of the
    batches, and with it the gain for several R_t from the current one down and for several m. The rollout itself may
    end later by at most `tolerance`. If no later moment is as good as the current one, the samples are moved. The
    question is asked at every plan, so the decision follows changed predictions, and a tail that has shrunk is packed
    further.

    The engines with the most remaining work are kept, so that few samples move. The samples of the others go, longest
    first, to the kept engines that finish first.

    Args:
        cost: of a move; may be replaced by a newer measurement.
        tolerance: largest delay of the rollout's end, as a share of the time until then.
        least_gain: smallest gain, as a share of the time until rollout and inference tasks are done.
    """

    def __init__(self, cost: MigrationCost, *, tolerance: float = 0.03, least_gain: float = 0.01) -> None:
        self.cost = cost
        self._tolerance, self._least_gain = tolerance, least_gain
        self.begin()

    def begin(self) -> None:
        """Start a new rollout."""
        self._samples, self._work_seconds = 0, 0.0  # of the whole rollout, as observed at its start

    def observe(self, samples: int, work_seconds: float) -> None:
        """Record the unfinished samples, and the device-seconds of scoring by frozen models that are left.

        The largest number of samples that was recorded counts as the size of the rollout.
        """
        if samples > self._samples:
            self._samples, self._work_seconds = samples, work_seconds

    def plan(self, state: RolloutState, freed: Collection[int], work_seconds: float) -> Plan | None:
        """Return a plan with migrations that empty further engines, and all freed engines, including those in `freed`.

        Returns None if nothing should be done yet.

        Args:
            freed: engines (indices) that were freed before.
            work_seconds: device-seconds of this rollout's inference tasks that are not done yet.
        """
        self.observe(len(state.ids), work_seconds)
        open_engines = np.setdiff1d(np.arange(len(state.engines)), list(freed))
        present = np.flatnonzero(np.isin(state.at, open_engines))
        if work_seconds <= 0.0 or len(open_engines) < 2 or len(present) == 0:
            return None
        forecast = _TailForecast(
            state, open_engines, present, self.cost, work_seconds, self._work_seconds / self._samples
        )
        latest = (1.0 + self._tolerance) * forecast.end
        gains = forecast.gains(len(present), latest)
        required = self._least_gain * forecast.total(forecast.end, 0.0, len(open_engines))
        best = max(gains.values(), default=0.0)
        for count in sorted({int(share * len(present)) for share in LOOKAHEAD_SHARES} - {0}, reverse=True):
            if best <= required:
                return None
            required = max([required, *(gain / WORTH_WAITING for gain in forecast.gains(count, latest).values())])
        candidates = [m for m, gain in gains.items() if gain > required and gain >= NEARLY_BEST * best]
        for kept in sorted(candidates, reverse=True)[:MAX_PACKINGS]:  # the more are kept, the fewer samples move
            packing = forecast.pack(kept)
            if packing and packing.end <= latest and forecast.gain(packing.end, 0.0, kept) > required:
                return Plan(packing.moves, tuple(sorted({*freed, *packing.emptied})))
        return None


@dataclass(frozen=True)
class _Packing:
    """The moves of a consolidation, the engines that it empties, and the seconds until the rollout then ends."""

    moves: tuple[Move, ...]
    emptied: tuple[int, ...]
    end: float


class _TailForecast:
    """How the open engines empty if nothing moves, and what consolidation would gain now or later.

    Args:
        open_engines: indices of engines that are not freed.
        present: [k] unfinished samples on these engines.
        work_seconds: device-seconds of inference tasks that are not done yet.
        seconds_each: device-seconds of the task of one sample.

    Attributes:
        end: seconds until the rollout ends if nothing moves.
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
        # Later moments, and the work that is ready by then: the tasks of the samples that are finished.
        unfinished = np.array([int(share * len(present)) for share in LOOKAHEAD_SHARES])
        self._moments = self._last_ends_first[unfinished]
        self._ready = np.maximum(work_seconds - seconds_each * unfinished, 0.0)
        engines = [state.engines[i] for i in open_engines]
        self._slots, self._kv = min(e.slots for e in engines), min(e.kv_tokens for e in engines)
        curves = dict.fromkeys((e.throughput, e.slots) for e in engines)
        seconds = [batch_seconds(throughput, slots, self._slots) for throughput, slots in curves]
        self._weights = np.diff(np.max(seconds, axis=0))  # the slowest curve, to be safe
        self._final = np.append(state.lengths + state.remaining, 0.0)
        self._copied = np.append(np.where(state.generated > 0, state.lengths, 0), 0)
        # [open engines] those that hold samples that cannot move, and must therefore be kept.
        self._held = np.isin(open_engines, state.at[present[~state.movable[present]]])

    def total(self, end: float, start: float, kept: int) -> float:
        """Seconds until rollout and inference tasks are done.

        The rollout ends at `end`, and all open engines but `kept` work on tasks from `start` on. At no moment can more
        work be done than is ready by then.
        """
        devices = len(self._state.engines)
        before, more = devices - len(self._open), len(self._open) - kept
        still = before * (end - self._moments) + more * (end - np.maximum(self._moments, start))
        done = min(before * end + more * (end - start), float((self._ready + np.maximum(still, 0.0)).min()))
        return end + max(0.0, self._work_seconds - done) / devices

    def gain(self, end: float, start: float, kept: int) -> float:
        """Seconds gained compared with moving nothing."""
        return self.total(self.end, 0.0, len(self._open)) - self.total(end, start, kept)

    def gains(self, count: int, latest: float) -> dict[int, float]:
        """Seconds gained by consolidation when `count` samples are unfinished, by number of kept engines.

        Numbers are left out for which slots or KV room do not suffice or the rollout would end after `latest`. The end
        of the rollout is an estimate: samples are dealt to the kept engines in turn, longest first, so that the first
        of these engines ends last, unless a kept engine's own samples end even later.
        """
        at_once = count == len(self._present)
        start = 0.0 if at_once else float(self._last_ends_first[count])
        progress = self._decay.progress(self._ends, start)[:, None]
        alive = self._ends > start
        left = np.where(alive, self._decay.remaining - progress, 0.0)
        who = self._decay.samples
        moving = np.where(alive, self._copied[who] + progress, 0.0).sum(axis=1)[self._open]
        order = self._by_work(left.sum(axis=1)[self._open], held_first=at_once)
        moving = moving[order]
        own_end = np.maximum.accumulate(self._decay.finish[self._open][order])  # kept engines keep their samples
        final = float(self._final[who][alive].sum())
        longest_first = -np.sort(-left[alive])
        least = int(self._held.sum()) if at_once else 1
        found = {}
        for kept in _engine_counts(max(least, 1), len(self._open) - 1):
            if len(longest_first) > kept * self._slots or final > kept * self._kv:
                continue
            longest = longest_first[::kept]
            copied = float(moving[kept:].sum())
            end = start + float(longest @ self._weights[: len(longest)]) + copied * self._cost.per_token / kept
            end = max(end + (self._cost.downtime if copied else 0.0), float(own_end[kept - 1]))
            if end <= latest:
                found[kept] = self.gain(end, start, kept)
        return found

    def pack(self, kept: int) -> _Packing | None:
        """The moves that empty all engines but `kept` at once; None if slots or KV room do not suffice.

        The longest samples are placed first, each on one of the kept engines that finish early.
        """
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
        copying = np.zeros(len(slots))  # seconds
        moves: list[Move] = []
        while len(leaving):
            engines = order[:kept]
            engines = engines[(decay.counts[engines] < slots[engines]) & (kv_room[engines] >= self._final[leaving[0]])]
            if len(engines) == 0:
                return None
            engines = engines[np.argsort((decay.finish + copying)[engines], kind="stable")][: (kept + 1) // 2]
            samples = leaving[: len(engines)]
            fits = self._final[samples] <= kv_room[engines[: len(samples)]]
            samples, engines = samples[fits], engines[: len(samples)][fits]
            decay.insert(engines, samples)
            kv_room[engines] -= self._final[samples]
            copying[engines] += self._copied[samples] * cost.per_token
            moves += [Move(int(i), int(e)) for i, e in zip(samples, engines, strict=True)]
            leaving = leaving[~np.isin(leaving, samples)]
        downtime = cost.downtime if any(self._copied[move.sample] for move in moves) else 0.0
        return _Packing(tuple(moves), tuple(order[kept:].tolist()), float((decay.finish + copying).max()) + downtime)

    def _by_work(self, work: Floats, held_first: bool) -> Ints:
        """Positions in `open_engines` by falling work; with `held_first`, engines that must be kept come first."""
        return np.lexsort((-work, ~self._held)) if held_first else np.argsort(-work, kind="stable")


def _engine_counts(least: int, most: int) -> list[int]:
    """Whole numbers from `least` to `most`: all of them, or about `MAX_ENGINE_COUNTS` at equal ratios."""
    if most - least < MAX_ENGINE_COUNTS:
        return list(range(least, most + 1))
    return sorted(set(np.rint(np.geomspace(least, most, MAX_ENGINE_COUNTS)).astype(int).tolist()))


class TailPolicy:
    """Sample reallocation, and consolidation when reallocation has nothing to gain. Implements `RolloutPolicy`.

    `Plan.freed` names all engines freed in this rollout so far, by their indices in the state given, and nothing moves
    to them. A freed engine that still has samples takes part again: a move from it failed, or it received samples of an
    engine that died. If all remaining engines are freed, all take part again.

    Args:
        reallocator, consolidator: None switches it off.
        work_seconds: called at every plan: device-seconds of this rollout's inference tasks that are not done yet, for
            finished and unfinished samples.
    """

    def __init__(
        self,
        reallocator: Reallocator | None,
        consolidator: Consolidator | None = None,
        work_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._reallocator, self._consolidator, self._work_seconds = reallocator, consolidator, work_seconds
        self._freed: set[int] = set()  # ranks, because indices change when an engine dies

    def learn_cost(self, cost: MigrationCost) -> None:
        """Set the cost of a move to a newer measurement."""
        for part in (self._reallocator, self._consolidator):
            if part:
                part.cost = cost

    def begin(self) -> None:
        """Start a new rollout, in which all engines serve."""
        self._freed.clear()
        if self._reallocator:
            self._reallocator.begin()
        if self._consolidator:
            self._consolidator.begin()

    def plan(self, state: RolloutState) -> Plan:
        """Moves to make now, and all engines freed so far."""
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
