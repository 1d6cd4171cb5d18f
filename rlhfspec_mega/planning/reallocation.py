"""Sample reallocation: plans moves of samples from engines that will finish late to engines that will finish early."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from rlhfspec_mega.planning.rollout_state import Bools, Floats, Ints, MigrationCost, Move, RolloutState
from rlhfspec_mega.planning.throughput import Decay

LATE_BAND = 0.1  # engines that finish within this share of the latest finish give samples away in the same round
PAIRS = 64  # approximate number of engine pairs compared in a round
CANDIDATES = 16  # samples of an engine compared in a round, evenly from longest to shortest; all if none of them helps
EXCHANGE_PARTNERS = 4  # engines with which the latest one tries to exchange samples
# Most (sample, destination) pairs compared in one plan, in total and per engine; the larger bound holds. It limits the
# time that planning takes.
MAX_COMPARED, MAX_COMPARED_EACH = 24_000, 96
ROUND_OVERHEAD = 700  # comparisons that take as long as everything else in a round
SPARE = 8  # samples that an engine may hold beyond those of the fullest engine
# Share of the makespan that is added to the cost of each move, so that cheap moves are compared by gain alone.
SMALL_COST = 0.01
PARTIAL = 0.5  # share of the excess time that a plan may leave if it ran out of comparisons
MIN_GAIN_SHARE = 1e-9  # share of the makespan below which a gain is rounding error


class _MovePlan:
    """A plan of moves that is being built. Arrays by sample have one more entry, which stands for "no sample".

    Args:
        cooling: [N] samples that may not move because they moved recently.
        barred: [engines, engines] pairs of source and destination between which no started sample may move.
        closed: engines (indices) that receive no samples.
    """

    def __init__(
        self, state: RolloutState, cost: MigrationCost, cooling: Bools, barred: Bools, closed: Collection[int]
    ) -> None:
        engines, count = state.engines, len(state.engines)
        final, begun = state.lengths + state.remaining, state.generated > 0
        held = np.bincount(state.at, final, count)
        self.decay = Decay(engines, state.at, state.remaining, np.arange(len(state.ids)), SPARE)  # after planned moves
        self.destination = state.at.copy()  # [N] engine of each sample after the planned moves
        self.bound = self.decay.least_makespan()  # seconds; no plan can finish sooner
        self.remaining = np.append(state.remaining, 0.0)
        # Seconds that a move costs each of its two engines, and seconds in which the moving sample is not decoded.
        self.price = np.append(state.lengths * np.where(begun, cost.per_token, cost.prefill), 0.0)
        self.downtime = np.append(np.where(begun, cost.downtime, 0.0), 0.0)
        self.final = np.append(final, 0.0)  # tokens of each sample once it is finished
        self.movable = np.append(state.movable & ~cooling, False)
        self.begun = np.append(begun, False)  # must find a free slot, as it would otherwise stop decoding
        self.load = np.zeros(count)  # [engines] seconds spent on copying
        self.wait = np.zeros(count)  # [engines] longest downtime among the samples that arrive
        # [engines] slots that are neither taken nor waited for; negative where samples wait.
        self.free = np.array([engine.slots for engine in engines]) - self.decay.counts
        self.kv_room = np.array([engine.kv_tokens for engine in engines], np.float64) - held
        self.open = ~np.isin(np.arange(count), list(closed))
        self.barred = barred

    @property
    def finish(self) -> Floats:
        """Seconds [engines] until each engine is done, moves included."""
        return self.decay.finish + self.load + self.wait

    def improve(self, exhaustive: bool) -> tuple[int, bool]:
        """One greedy round: each of the latest engines gives one sample to an early engine, if that helps.

        Args:
            exhaustive: only the latest engine gives, but any of its samples to any engine; otherwise some samples of
                several late engines are compared for a few early engines each.

        Returns:
            Number of (sample, destination) pairs compared, and whether anything moved.
        """
        finish = self.finish
        top = float(finish.max())
        latest_first = np.argsort(-finish, kind="stable")
        late = int(np.count_nonzero(finish > max(self.bound, (1.0 - LATE_BAND) * top)))
        sources = latest_first[: 1 if exhaustive else min(late, max(1, len(finish) // 2))]
        early = latest_first[: len(sources) - 1 : -1] if len(sources) else latest_first[:0]
        early = early[(self.decay.counts[early] < self.decay.width) & self.open[early]]
        if len(early) == 0:
            return 0, False
        each = len(early) if exhaustive else min(len(early), max(1, PAIRS // len(sources)))
        offered = early[(np.arange(len(sources))[:, None] + np.arange(each)) % len(early)]
        columns = self._columns(sources, self.decay.width if exhaustive else CANDIDATES)
        scores = self._compare(np.repeat(sources, each), np.repeat(columns, each, axis=0), offered.ravel(), finish)
        choices = scores.reshape(len(sources), -1)
        best = choices.argmax(axis=1)
        moving = np.flatnonzero(choices[np.arange(len(sources)), best] > 0.0)
        destinations = offered[moving, best[moving] // columns.shape[1]]
        # Where several sources chose one destination, the latest of them gets it.
        destinations, firsts = np.unique(destinations, return_index=True)
        sources, best = sources[moving[firsts]], best[moving[firsts]] % columns.shape[1]
        moved = self.decay.remove(sources, columns[moving[firsts], best])
        self.decay.insert(destinations, moved)
        self._apply(moved, sources, destinations)
        return scores.size, len(moved) > 0

    def exchange(self) -> tuple[int, bool]:
        """The latest engine exchanges a sample for a shorter one of an early engine, in case that one has no room.

        An engine whose samples wait for slots receives only a sample that has not started.

        Returns:
            Number of pairs of samples compared, and whether anything moved.
        """
        finish, decay = self.finish, self.decay
        latest_first = np.argsort(-finish, kind="stable")
        last, others = latest_first[0], latest_first[:0:-1]
        others = others[self.open[others] & (decay.counts[others] > 0)][:EXCHANGE_PARTNERS]
        if len(others) == 0 or not self.open[last] or finish[last] <= self.bound:
            return 0, False
        columns, other_columns = self._columns(latest_first[:1], CANDIDATES)[0], self._columns(others, CANDIDATES)
        given = decay.samples[last, columns][None, :, None]
        taken = decay.samples[others[:, None], other_columns][:, None, :]
        last_ends, other_ends = decay.finish_exchanged(int(last), columns, others, other_columns)
        at, price = others[:, None, None], self.price[given] + self.price[taken]
        last_ends = last_ends + self.load[last] + np.maximum(self.wait[last], self.downtime[taken]) + price
        other_ends = other_ends + self.load[at] + np.maximum(self.wait[at], self.downtime[given]) + price
        gains = finish[last] - np.maximum(last_ends, other_ends)
        more = self.final[given] - self.final[taken]
        allowed = self.movable[given] & self.movable[taken] & (more <= self.kv_room[at]) & (-more <= self.kv_room[last])
        allowed &= gains > MIN_GAIN_SHARE * finish[last]
        allowed &= self.remaining[given] > self.remaining[taken]
        allowed &= ~self.begun[given] | (self.free[at] >= 0) & ~self.barred[last, at]
        allowed &= ~self.begun[taken] | (self.free[last] >= 0) & ~self.barred[at, last]
        costs = 2.0 * price + self.downtime[given] + self.downtime[taken] + SMALL_COST * finish[last]
        scores = np.where(allowed, gains / costs, 0.0)
        row, given_column, taken_column = np.unravel_index(int(scores.argmax()), scores.shape)
        if scores[row, given_column, taken_column] <= 0.0:
            return scores.size, False
        pair = np.array([last, others[row]])
        moved = decay.remove(pair, np.array([columns[given_column], other_columns[row, taken_column]]))
        decay.insert(pair[::-1], moved)
        self._apply(moved[:1], pair[:1], pair[1:])
        self._apply(moved[1:], pair[1:], pair[:1])
        return scores.size, True

    def _columns(self, engines: Ints, most: int) -> Ints:
        """Up to `most` columns [k, columns] of each engine's row, evenly from its longest sample to its shortest."""
        counts = self.decay.counts[engines]
        columns = max(1, min(most, int(counts.max())))
        return np.arange(columns) * counts[:, None] // columns

    def _compare(self, sources: Ints, columns: Ints, destinations: Ints, finish: Floats) -> Floats:
        """Scores [pairs, columns] of moving each sample; 0 if the move does not help or is not allowed.

        The score is the time by which the later of the two engines finishes earlier, divided by the cost of the move.
        """
        rows, top = sources[:, None], float(finish.max())
        who = self.decay.samples[rows, columns]
        price, downtime = self.price[who], self.downtime[who]
        source_ends = self.decay.finish_without[rows, columns] + (self.load + self.wait)[rows] + price
        destination_ends = self.decay.finish_with(destinations, self.remaining[who])
        destination_ends += self.load[destinations, None] + np.maximum(self.wait[destinations, None], downtime) + price
        gains = finish[rows] - np.maximum(source_ends, destination_ends)
        allowed = self.movable[who] & (self.final[who] <= self.kv_room[destinations, None])
        full = self.barred[sources, destinations] | (self.free[destinations] <= 0)
        allowed &= ~(self.begun[who] & full[:, None]) & (gains > MIN_GAIN_SHARE * top)
        return np.where(allowed, gains / (2.0 * price + downtime + SMALL_COST * top), 0.0)

    def _apply(self, moved: Ints, sources: Ints, destinations: Ints) -> None:
        """Update destinations, loads, slots and KV room for samples that move."""
        self.destination[moved] = destinations
        self.movable[moved] = False
        self.load[sources] += self.price[moved]
        self.load[destinations] += self.price[moved]
        self.wait[destinations] = np.maximum(self.wait[destinations], self.downtime[moved])
        self.free[sources] += 1
        self.free[destinations] -= 1
        self.kv_room[sources] += self.final[moved]
        self.kv_room[destinations] -= self.final[moved]


class Reallocator:
    """Moves samples while that makes the predicted end of the rollout earlier (RLHFSpec, arXiv 2512.04752).

    The plan is greedy. In each round, each of the engines that finish last gives one sample to an engine that finishes
    early: the one for which the later of the two finishes is reduced most, relative to the cost of the move. Predicted
    finishes include this cost: both engines lose `per_token` seconds for each token copied, a destination also loses
    the sample's downtime, and a sample that has not started costs a prefill of its prompt. Gains follow from the
    throughput curves: below the knee of its curve, an engine gains nothing from a smaller batch.

    * Moves that together gain less than `least_gain` are not made.
    * A started sample that has moved may not move again for `cool_down` seconds, and during this time no started sample
      may move between the two engines in the opposite direction. An engine receives no more started samples than it has
      free slots. Neither rule applies to samples that have not started: they can wait in any engine's queue.
    * An engine receives no more samples than its KV cache can hold once they are finished.
    * The planning time is bounded. A plan that ran out of comparisons is kept if it has removed half of the excess time
      of late engines; the next plan continues from there.

    Args:
        cost: of a move; may be replaced by a newer measurement.
        least_gain: smallest gain that is worth moving for, as a share of the time to the end of the rollout.
        cool_down: seconds.
    """

    def __init__(self, cost: MigrationCost, *, least_gain: float = 0.1, cool_down: float = 1.0) -> None:
        self.cost = cost
        self._least_gain, self._cool_down = least_gain, cool_down
        self.begin()

    def begin(self) -> None:
        """Start a new rollout: forget earlier moves."""
        self._moved: dict[str, float] = {}  # time of the last move, by sample id
        self._flows: dict[tuple[int, int], float] = {}  # time of the last move, by ranks of source and destination

    def plan(self, state: RolloutState, closed: Collection[int] = ()) -> tuple[Move, ...]:
        """Moves by sample, none to an engine (index) in `closed`; () if they would gain too little."""
        if len(state.engines) - len(closed) < 1 or len(state.ids) == 0:
            return ()
        moves = _MovePlan(state, self.cost, self._cooling_down(state), self._barred_pairs(state), closed)
        finish_before = moves.finish
        target = (1.0 - self._least_gain) * float(finish_before.max())
        if moves.bound > target:
            return ()
        left = max(MAX_COMPARED, MAX_COMPARED_EACH * len(state.engines))
        while left > 0:
            for attempt in (lambda: moves.improve(False), lambda: moves.improve(True), moves.exchange):
                compared, moved = attempt()
                left -= compared + ROUND_OVERHEAD
                if moved:
                    break
            else:
                break
        makespan = float(moves.finish.max())
        # A plan that ran out of comparisons has not reached all late engines, but helps those that it has reached.
        allowed = PARTIAL * _excess(finish_before, target) if left <= 0 else 0.0
        if _excess(moves.finish, target) > allowed:
            return ()
        needed = _needed_moves(moves, state.at, finish_before, makespan)
        self._remember(state, needed)
        return needed

    def _cooling_down(self, state: RolloutState) -> Bools:
        """[N] samples that have moved less than `cool_down` seconds ago, after they had started."""
        self._moved = {name: when for name, when in self._moved.items() if when > state.now - self._cool_down}
        if not self._moved:
            return np.zeros(len(state.ids), np.bool_)
        return np.array([name in self._moved for name in state.ids]) & (state.generated > 0)

    def _barred_pairs(self, state: RolloutState) -> Bools:
        """[engines, engines] pairs whose opposite direction a started sample took less than `cool_down` seconds ago."""
        self._flows = {pair: when for pair, when in self._flows.items() if when > state.now - self._cool_down}
        index = {engine.rank: i for i, engine in enumerate(state.engines)}
        barred = np.zeros((len(index), len(index)), np.bool_)
        for source, destination in self._flows:
            if source in index and destination in index:
                barred[index[destination], index[source]] = True
        return barred

    def _remember(self, state: RolloutState, moves: Sequence[Move]) -> None:
        for move in moves:
            if state.generated[move.sample] == 0:
                continue  # the cool-down applies to started samples only
            source, destination = state.engines[state.at[move.sample]], state.engines[move.destination]
            self._moved[state.ids[move.sample]] = state.now
            self._flows[source.rank, destination.rank] = state.now


def _excess(finish: Floats, target: float) -> float:
    """Sum over engines of the seconds by which each finishes later than `target`."""
    return float(np.maximum(finish - target, 0.0).sum())


def _needed_moves(plan: _MovePlan, at: Ints, finish_before: Floats, makespan: float) -> tuple[Move, ...]:
    """The planned moves, except those from engines that would finish in time anyway and receive no samples."""
    moved = np.flatnonzero(plan.destination != at)
    unneeded = finish_before <= makespan
    unneeded[plan.destination[moved]] = False
    return tuple(Move(int(i), int(plan.destination[i])) for i in moved if not unneeded[at[i]])
