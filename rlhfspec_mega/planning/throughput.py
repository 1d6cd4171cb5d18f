"""How long engines take to empty: throughput curves, and the decay of a batch as its samples end one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel
from rlhfspec_mega.planning.payoff import MARGIN, Forecast, drafting_rate
from rlhfspec_mega.planning.rollout_state import EngineState, Floats, Ints, Throughput
from rlhfspec_mega.planning.tree import Batch


def seconds_per_token(throughput: Throughput, batches: Ints | Floats) -> Floats:
    """Seconds in which each sample of a batch gains one token, for batches of 1 and more; the shape of `batches`.

    Straight lines between the points and beyond the last, where it does not fall.

    Raises:
        UserError: the curve has no points, unequally many numbers, batches that do not ascend from 1, or a time that is
            not above 0.
    """
    xs, ys = np.array(throughput.batches, np.float64), np.array(throughput.seconds, np.float64)
    if len(xs) == 0 or len(xs) != len(ys) or xs[0] != 1 or (np.diff(xs) <= 0).any():
        raise UserError(
            f"A throughput curve has batches {list(throughput.batches)} and {len(ys)} times; give one time for each of "
            "several batches that ascend from 1."
        )
    if not (np.isfinite(ys) & (ys > 0)).all():
        raise UserError(f"A throughput curve has times {list(throughput.seconds)}; they must be seconds above 0.")
    slope = max(0.0, (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])) if len(xs) > 1 else 0.0
    return np.interp(batches, xs, ys) + slope * np.maximum(np.subtract(batches, xs[-1]), 0.0)


def batch_seconds(throughput: Throughput, slots: int, most: int) -> Floats:
    """Seconds in which each of 0, 1, .. `most` samples gains one token [most + 1]; 0 for none.

    Beyond `slots` samples are taken to share the slots in turns (processor sharing), at the throughput of full slots.
    Really they wait for a slot: the engine works as much, only who ends when differs.
    """
    batches = np.arange(1.0, most + 1)
    turns = np.maximum(batches / slots, 1.0)
    return np.append(0.0, turns * seconds_per_token(throughput, np.minimum(batches, slots)))


def decay_seconds(throughput: Throughput, remaining: Floats, slots: int) -> float:
    """Seconds until samples that still need so many tokens [k] have all ended, decoded at once as a shrinking batch.

    While the i-th longest is the shortest left, i samples decode at T(i) seconds per token: sum_i (r_i - r_i+1) T(i).
    More than `slots` samples: see `batch_seconds`.
    """
    seconds = batch_seconds(throughput, slots, len(remaining))
    return float(np.sort(remaining)[::-1] @ np.diff(seconds))


class Decay:
    """The unfinished samples of all engines, longest first, and how each engine empties.

    Seconds until an engine is empty are linear in its sorted remaining tokens, sum_i r_i (T(i) - T(i - 1)): so prefix
    sums tell what one sample more or less would change, for all samples and engines at once. Samples can be taken out
    and put in; only the engines touched are computed anew.

    Args:
        at: engine of each sample [N].
        remaining: tokens [N], above 0.
        present: samples that are put in at once, ascending [k].
        spare: room for so many samples above those of the fullest engine.

    Attributes:
        samples: [engines, width] indices of samples by falling `remaining`, then by index; N where there is none.
        remaining: [engines, width] their tokens, 0 where there is none.
        counts: [engines] samples.
        finish: [engines] seconds until empty.
        without: [engines, width] seconds until empty if the sample there were not.
    """

    def __init__(self, engines: Sequence[EngineState], at: Ints, remaining: Floats, present: Ints, spare: int) -> None:
        homes = at[present]
        self.counts = np.bincount(homes, minlength=len(engines))
        self.width = int(self.counts.max()) + max(spare, 1)
        self._tokens = np.append(remaining, 0.0)
        order = np.argsort(-remaining[present], kind="stable")
        few_bits = np.min_scalar_type(len(engines))  # are sorted in linear time
        order = order[np.argsort(homes[order].astype(few_bits), kind="stable")]
        self.samples = np.full((len(engines), self.width), len(at))
        columns = np.arange(len(order)) - (np.cumsum(self.counts) - self.counts)[homes[order]]
        self.samples[homes[order], columns] = present[order]
        known: dict[tuple[Throughput, int], Floats] = {}
        for engine in engines:
            key = engine.throughput, engine.slots
            if key not in known:
                known[key] = batch_seconds(engine.throughput, engine.slots, self.width + 1)
        self._seconds = np.stack([known[engine.throughput, engine.slots] for engine in engines])
        self._weights = np.diff(self._seconds)  # [engines, width + 1], of the longest sample first
        self.remaining = np.zeros(self.samples.shape)
        self.finish = np.zeros(len(engines))
        self.without = np.zeros(self.samples.shape)
        self._before = np.zeros((len(engines), self.width + 1))  # seconds due to the samples before a place
        self._earlier = np.zeros((len(engines), self.width + 1))  # were they one place earlier, without the first
        self._behind = np.zeros((len(engines), self.width + 1))  # of those from a place on, were they one place later
        self._compute(np.arange(len(engines)))

    def least_makespan(self) -> float:
        """No assignment ends sooner: the longest sample alone, and all tokens at the best rate of every engine."""
        seconds = self._seconds[:, 1:]
        rate = 1.0 / (seconds / np.arange(1.0, seconds.shape[1] + 1)).min()
        work = float(self.remaining.sum()) / (rate * len(seconds))
        return max(work, float(self.remaining.max()) * float(seconds.min()))

    def places(self, engines: Ints, remaining: Floats) -> Ints:
        """Where samples of so many tokens [k, n] would stand on these engines [k]: behind equals."""
        width, shift = self.width, np.arange(len(engines))[:, None]
        rows = self.remaining[engines]
        # One search in all rows: each is lifted above the one before it.
        lift = shift * (max(float(rows.max(initial=0.0)), float(remaining.max(initial=0.0))) + 1.0)
        found = np.searchsorted((lift - rows).ravel(), (lift - remaining).ravel(), side="right")
        return found.reshape(remaining.shape) - shift * width

    def finish_with(self, engines: Ints, remaining: Floats) -> Floats:
        """Seconds [k, n] until each engine [k] is empty with one sample of so many tokens [k, n] more."""
        places, rows = self.places(engines, remaining), engines[:, None]
        return self._before[rows, places] + remaining * self._weights[rows, places] + self._behind[rows, places]

    def finish_exchanged(self, one: int, columns: Ints, others: Ints, other_columns: Ints) -> tuple[Floats, Floats]:
        """Seconds until engine `one` and each other [k] is empty if two samples changed places: [k, c, d] each.

        Meant only where the sample of `one` (columns [c]) is longer than the other's (columns [k, d]).
        """
        longer, shorter = self.remaining[one, columns], self.remaining[others[:, None], other_columns]
        places = np.maximum(self.places(np.full(len(others), one), shorter), 1)[:, None, :]
        columns, other_columns = columns[:, None], other_columns[:, None, :]
        first = self._before[one, columns] + self._earlier[one, places] - self._earlier[one, columns + 1]
        first = first + shorter[:, None, :] * self._weights[one, places - 1]
        first += self.finish[one] - self._before[one, places]
        places = self.places(others, np.broadcast_to(longer, (len(others), len(longer))))[:, :, None]
        others = others[:, None, None]
        second = self._before[others, places] + longer[:, None] * self._weights[others, places]
        second = second + self._behind[others, places] - self._behind[others, other_columns]
        second += self.finish[others] - self._before[others, other_columns + 1]
        return first, second

    def take_out(self, engines: Ints, columns: Ints) -> Ints:
        """Take one sample each from different engines [k], from these columns; the samples [k]."""
        taken = self.samples[engines, columns]
        steps = np.arange(self.width)
        kept = np.minimum(steps + (steps >= columns[:, None]), self.width - 1)
        rows = np.take_along_axis(self.samples[engines], kept, axis=1)
        rows[:, -1] = len(self._tokens) - 1
        self.samples[engines] = rows
        self.counts[engines] -= 1
        self._compute(engines)
        return taken

    def put_in(self, engines: Ints, samples: Ints) -> None:
        """Put one sample each into different engines [k] that have fewer than `width`."""
        places = self.places(engines, self._tokens[samples][:, None])
        steps = np.arange(self.width)
        rows = np.take_along_axis(self.samples[engines], np.maximum(steps - (steps > places), 0), axis=1)
        np.put_along_axis(rows, places, samples[:, None], axis=1)
        self.samples[engines] = rows
        self.counts[engines] += 1
        self._compute(engines)

    def ends(self) -> Floats:
        """Seconds [engines, width] until each sample ends; 0 where there is none."""
        return self.remaining * self._seconds[:, 1 : self.width + 1] + (self.finish[:, None] - self._before[:, 1:])

    def progress(self, ends: Floats, seconds: float) -> Floats:
        """Tokens [engines] that every unfinished sample of an engine has gained after so many seconds."""
        alive = (ends > seconds).sum(axis=1)
        rows, last = np.arange(len(alive)), np.minimum(alive, self.width - 1)
        since = (seconds - ends[rows, last]) / np.maximum(self._seconds[rows, alive], 1e-12)
        return np.where(alive > 0, self.remaining[rows, last] + since, 0.0)

    def _compute(self, engines: Ints) -> None:
        tokens = self._tokens[self.samples[engines]]
        weights = self._weights[engines]
        self.remaining[engines] = tokens
        before = np.zeros((len(engines), self.width + 1))
        np.cumsum(tokens * weights[:, :-1], axis=1, out=before[:, 1:])
        earlier = np.zeros_like(before)
        np.cumsum(tokens[:, 1:] * weights[:, :-2], axis=1, out=earlier[:, 2:])
        later = np.zeros_like(before)
        np.cumsum(tokens * weights[:, 1:], axis=1, out=later[:, 1:])
        self._before[engines], self._earlier[engines] = before, earlier
        self._behind[engines] = later[:, -1:] - later
        self.finish[engines] = before[:, -1]
        self.without[engines] = before[:, :-1] + earlier[:, -1:] - earlier[:, 1:]


def throughput_of(
    cost: CostModel,
    acceptance: AcceptanceModel | None,
    *,
    slots: int,
    length: int,
    temperature: float = 1.0,
    width: int = 1,
    depth: int = 1,
    max_nodes: int = 1,
    whole: bool = False,
) -> Throughput:
    """The curve of an engine at batches 1, 2, 4, .. slots, as its drafting policy would decode them.

    Args:
        acceptance: of its draft; None: it decodes plainly, and the arguments of drafting count nothing.
        length: tokens of prompt and response of a typical sample.
        width, depth, max_nodes: of the drafting policy.
        whole: see `Payoff`.
    """
    forecast = Forecast(acceptance, width, depth) if acceptance else None
    batches = tuple(sorted({*(2**k for k in range(slots.bit_length())), slots}))
    seconds = []
    for size in batches:
        kv_tokens = size * length
        rate = size / float(cost.verify_seconds(size, kv_tokens, size))
        if forecast:
            ones = np.ones(size, np.int64)
            batch = Batch(ones * length, ones * length, ones, np.full(size, temperature), size, np.arange(size))
            drafting = drafting_rate(forecast.of(batch), cost, batch, depth, max_nodes, whole)
            rate = drafting if drafting > MARGIN * rate else rate
        seconds.append(size / rate)
    return Throughput(batches, tuple(seconds))
