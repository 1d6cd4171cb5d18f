"""Sample reallocation: which samples go from engines that will end late to engines that will end early, and when."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from rlhfspec_mega.planning.rollout_state import Bools, Floats, Ints, MigrationCost, Move, RolloutState
from rlhfspec_mega.planning.throughput import Decay

BAND = 0.1  # engines that end within this share of the last one give up samples together
PAIRS = 64  # of engines compared in a round, about
COLUMNS = 16  # samples of an engine compared, from the longest to the shortest, unless none of them helps
EXCHANGED = 4  # engines that the last one tries to exchange samples with
# Samples times destinations in one plan, or by engine if that is more: bounds its time.
MOST_COMPARED, MOST_COMPARED_EACH = 24_000, 96
ROUND = 700  # comparisons that take as long as the rest of a round
SPARE = 8  # samples that an engine may come to hold above the fullest one
SMALL_EFFORT = 0.01  # of the makespan: moves that cost less than this are told apart by their gain alone
PARTIAL = 0.5  # of the time beyond what is enough that a plan cut short may leave
LEAST_SHARE = 1e-9  # of the makespan: gains below are rounding


class _Draft:
    """A plan in the making. Arrays by sample have an entry more, for none."""

    def __init__(
        self, state: RolloutState, cost: MigrationCost, resting: Bools, barred: Bools, closed: Collection[int]
    ) -> None:
        """`resting` samples may not move, nor may any from the source to the destination of a `barred` pair."""
        engines, count = state.engines, len(state.engines)
        final, begun = state.lengths + state.remaining, state.generated > 0
        held = np.bincount(state.at, final, count)
        self.decay = Decay(engines, state.at, state.remaining, np.arange(len(state.ids)), SPARE)  # with the moves made
        self.destination = state.at.copy()  # [N] where each sample is to be
        self.bound = self.decay.least_makespan()  # seconds; no plan ends sooner
        self.remaining = np.append(state.remaining, 0.0)
        # Seconds of both engines' time that moving each sample takes; seconds in which it is decoded nowhere.
        self.price = np.append(state.lengths * np.where(begun, cost.per_token, cost.prefill), 0.0)
        self.downtime = np.append(np.where(begun, cost.downtime, 0.0), 0.0)
        self.final = np.append(final, 0.0)  # tokens of each sample in the end
        self.movable = np.append(state.movable & ~resting, False)
        self.begun = np.append(begun, False)  # it would stand still where it had to wait for a slot
        self.load = np.zeros(count)  # [engines] seconds that copying takes
        self.wait = np.zeros(count)  # [engines] the longest downtime of a sample that comes
        # [engines] slots that no sample has or waits for, less than 0 where samples wait.
        self.free = np.array([engine.slots for engine in engines]) - self.decay.counts
        self.kv_room = np.array([engine.kv_tokens for engine in engines], np.float64) - held
        self.open = ~np.isin(np.arange(count), list(closed))
        self.barred = barred

    @property
    def finish(self) -> Floats:
        """Seconds until each engine is done."""
        return self.decay.finish + self.load + self.wait

    def improve(self, everywhere: bool) -> tuple[int, bool]:
        """One round: engines that end last give one sample each, as far as that helps.

        Args:
            everywhere: only the last engine gives, any of its samples, to whichever engine is best; else a few of the
                last to a few of the first.

        Returns:
            Samples times destinations compared, and whether anything moved.
        """
        finish = self.finish
        top = float(finish.max())
        late_first = np.argsort(-finish, kind="stable")
        late = int(np.count_nonzero(finish > max(self.bound, (1.0 - BAND) * top)))
        sources = late_first[: 1 if everywhere else min(late, max(1, len(finish) // 2))]
        early = late_first[: len(sources) - 1 : -1] if len(sources) else late_first[:0]
        early = early[(self.decay.counts[early] < self.decay.width) & self.open[early]]
        if len(early) == 0:
            return 0, False
        each = len(early) if everywhere else min(len(early), max(1, PAIRS // len(sources)))
        offered = early[(np.arange(len(sources))[:, None] + np.arange(each)) % len(early)]
        columns = self._columns(sources, self.decay.width if everywhere else COLUMNS)
        scores = self._compare(np.repeat(sources, each), np.repeat(columns, each, axis=0), offered.ravel(), finish)
        choices = scores.reshape(len(sources), -1)
        best = choices.argmax(axis=1)
        moving = np.flatnonzero(choices[np.arange(len(sources)), best] > 0.0)
        destinations = offered[moving, best[moving] // columns.shape[1]]
        destinations, firsts = np.unique(destinations, return_index=True)  # several for one: the latest engine's
        givers, best = sources[moving[firsts]], best[moving[firsts]] % columns.shape[1]
        moved = self.decay.take_out(givers, columns[moving[firsts], best])
        self.decay.put_in(destinations, moved)
        self._enter(moved, givers, destinations)
        return scores.size, len(moved) > 0

    def exchange(self) -> tuple[int, bool]:
        """The last engine changes a sample for a shorter one of an engine that ends early: for engines without room.

        Where samples wait for a slot only such a one comes as has not begun.

        Returns:
            Pairs of samples compared, and whether anything moved.
        """
        finish, decay = self.finish, self.decay
        late_first = np.argsort(-finish, kind="stable")
        last, others = late_first[0], late_first[:0:-1]
        others = others[self.open[others] & (decay.counts[others] > 0)][:EXCHANGED]
        if len(others) == 0 or not self.open[last] or finish[last] <= self.bound:
            return 0, False
        columns, other_columns = self._columns(late_first[:1], COLUMNS)[0], self._columns(others, COLUMNS)
        given = decay.samples[last, columns][None, :, None]
        taken = decay.samples[others[:, None], other_columns][:, None, :]
        last_ends, other_ends = decay.finish_exchanged(int(last), columns, others, other_columns)
        at, price = others[:, None, None], self.price[given] + self.price[taken]
        last_ends = last_ends + self.load[last] + np.maximum(self.wait[last], self.downtime[taken]) + price
        other_ends = other_ends + self.load[at] + np.maximum(self.wait[at], self.downtime[given]) + price
        gains = finish[last] - np.maximum(last_ends, other_ends)
        more = self.final[given] - self.final[taken]
        allowed = self.movable[given] & self.movable[taken] & (more <= self.kv_room[at]) & (-more <= self.kv_room[last])
        allowed &= gains > LEAST_SHARE * finish[last]
        allowed &= self.remaining[given] > self.remaining[taken]
        allowed &= ~self.begun[given] | (self.free[at] >= 0) & ~self.barred[last, at]
        allowed &= ~self.begun[taken] | (self.free[last] >= 0) & ~self.barred[at, last]
        worth = 2.0 * price + self.downtime[given] + self.downtime[taken] + SMALL_EFFORT * finish[last]
        scores = np.where(allowed, gains / worth, 0.0)
        other, one, its = np.unravel_index(int(scores.argmax()), scores.shape)
        if scores[other, one, its] <= 0.0:
            return scores.size, False
        ends = np.array([last, others[other]])
        moved = decay.take_out(ends, np.array([columns[one], other_columns[other, its]]))
        decay.put_in(ends[::-1], moved)
        self._enter(moved[:1], ends[:1], ends[1:])
        self._enter(moved[1:], ends[1:], ends[:1])
        return scores.size, True

    def _columns(self, engines: Ints, most: int) -> Ints:
        """Up to so many places [k, columns] in each engine's row, evenly from its longest sample to its shortest."""
        counts = self.decay.counts[engines]
        columns = max(1, min(most, int(counts.max())))
        return np.arange(columns) * counts[:, None] // columns

    def _compare(self, sources: Ints, columns: Ints, destinations: Ints, finish: Floats) -> Floats:
        """What it is worth [pairs, columns] that a sample moves, 0 if it does not help or is not allowed.

        Worth: how much earlier the later of the two engines ends, by what the move costs.
        """
        rows, top = sources[:, None], float(finish.max())
        who = self.decay.samples[rows, columns]
        price, downtime = self.price[who], self.downtime[who]
        source_ends = self.decay.without[rows, columns] + (self.load + self.wait)[rows] + price
        destination_ends = self.decay.finish_with(destinations, self.remaining[who])
        destination_ends += self.load[destinations, None] + np.maximum(self.wait[destinations, None], downtime) + price
        gains = finish[rows] - np.maximum(source_ends, destination_ends)
        allowed = self.movable[who] & (self.final[who] <= self.kv_room[destinations, None])
        stays = self.barred[sources, destinations] | (self.free[destinations] <= 0)
        allowed &= ~(self.begun[who] & stays[:, None]) & (gains > LEAST_SHARE * top)
        return np.where(allowed, gains / (2.0 * price + downtime + SMALL_EFFORT * top), 0.0)

    def _enter(self, moved: Ints, sources: Ints, destinations: Ints) -> None:
        """Account for samples that have moved."""
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
    """Moves samples while that brings the predicted end of the rollout forward (RLHFSpec, sample reallocation).

    Greedy rounds: each of the engines that end last gives one sample to an engine that ends early, such that the later
    of the two ends as much earlier as possible for what the move costs. The predicted end contains the cost of the
    moves: both engines lose `per_token` seconds for each token copied, and an engine that samples come to ends later by
    their downtime; what nobody has decoded yet costs a prefill of its prompt. Throughput curves decide: where a batch
    is below the knee of its curve, taking samples out of it gains nothing.

    Moves that bring less than `least_gain` all together are not made. Samples moved after they had begun stay for
    `cool_down` seconds, and as long no such sample moves between the two engines the other way. An engine takes no more
    of them than it has slots free; samples that have not begun wait as well at one place as at another, and are bound
    by neither. An engine takes no more than the KV that all its samples will have in the end leaves room for. The time
    of a plan is bounded: of very many moves the next plan makes the rest, and one that was cut short is kept if it has
    taken away half of what late engines have too much.

    Args:
        cost: of a move; may be replaced when it is known better.
        least_gain: share of the time to the end of the rollout.
        cool_down: seconds.
    """

    def __init__(self, cost: MigrationCost, *, least_gain: float = 0.1, cool_down: float = 1.0) -> None:
        self.cost = cost
        self._least_gain, self._cool_down = least_gain, cool_down
        self.begin()

    def begin(self) -> None:
        """A new rollout begins: nothing has moved in it."""
        self._moved: dict[str, float] = {}  # when, by sample id
        self._flows: dict[tuple[int, int], float] = {}  # when last, by ranks of source and destination

    def plan(self, state: RolloutState, closed: Collection[int] = ()) -> tuple[Move, ...]:
        """Moves that pay, by sample; none goes to an engine (index) in `closed`."""
        if len(state.engines) - len(closed) < 1 or len(state.ids) == 0:
            return ()
        draft = _Draft(state, self.cost, self._resting(state), self._barred(state), closed)
        at_first = draft.finish
        enough = (1.0 - self._least_gain) * float(at_first.max())
        if draft.bound > enough:
            return ()
        left = max(MOST_COMPARED, MOST_COMPARED_EACH * len(state.engines))
        while left > 0:
            for attempt in (lambda: draft.improve(False), lambda: draft.improve(True), draft.exchange):
                compared, moved = attempt()
                left -= compared + ROUND
                if moved:
                    break
            else:
                break
        last = float(draft.finish.max())
        # A plan that was cut short has not come to all late engines: it is kept for what it has done for the others.
        allowed = PARTIAL * _excess(at_first, enough) if left <= 0 else 0.0
        if _excess(draft.finish, enough) > allowed:
            return ()
        moves = _needed(draft, state.at, at_first, last)
        self._remember(state, moves)
        return moves

    def _resting(self, state: RolloutState) -> Bools:
        """Samples that were moved lately after they had begun."""
        self._moved = {name: when for name, when in self._moved.items() if when > state.now - self._cool_down}
        if not self._moved:
            return np.zeros(len(state.ids), np.bool_)
        return np.array([name in self._moved for name in state.ids]) & (state.generated > 0)

    def _barred(self, state: RolloutState) -> Bools:
        """Pairs of engines that samples have lately gone through the other way."""
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
                continue  # what has not begun is bound by no rest
            source, destination = state.engines[state.at[move.sample]], state.engines[move.destination]
            self._moved[state.ids[move.sample]] = state.now
            self._flows[source.rank, destination.rank] = state.now


def _excess(finish: Floats, enough: float) -> float:
    """Seconds by which engines end later than that, together."""
    return float(np.maximum(finish - enough, 0.0).sum())


def _needed(draft: _Draft, at: Ints, at_first: Floats, last: float) -> tuple[Move, ...]:
    """The draft's moves without those from engines that would have ended in time anyway and take none themselves."""
    moved = np.flatnonzero(draft.destination != at)
    needless = at_first <= last
    needless[draft.destination[moved]] = False
    return tuple(Move(int(i), int(draft.destination[i])) for i in moved if not needless[at[i]])
