"""How long engines take to finish their samples: throughput curves, and batches that shrink as samples finish."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.planning.acceptance import AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel
from rlhfspec_mega.planning.forecast import MARGIN, Forecast, drafting_rate
from rlhfspec_mega.planning.modes import DRAFTED, RECALLED, ModeChoice
from rlhfspec_mega.planning.rollout_state import EngineState, Floats, Ints, Throughput
from rlhfspec_mega.planning.tree import Batch


def seconds_per_token(throughput: Throughput, batches: Ints | Floats) -> Floats:
    """Seconds in which each sample of a batch of this size gains one token; has the shape of `batches`.

    Linear between the points of the curve; beyond the last, the last slope continues, or a slope of 0 if it falls.

    Args:
        batches: batch sizes, from 1.

    Raises:
        UserError: the curve has no points, or not one time per batch; its batches do not ascend from 1; or a time is
            not above 0.
    """
    xs, ys = np.array(throughput.batches, np.float64), np.array(throughput.seconds, np.float64)
    if len(xs) == 0 or len(xs) != len(ys) or xs[0] != 1 or (np.diff(xs) <= 0).any():
        raise UserError(
            f"A throughput curve has the batches {list(throughput.batches)} and {len(ys)} times: give batches that "
            "ascend from 1, and one time for each of them."
        )
    if not (np.isfinite(ys) & (ys > 0)).all():
        raise UserError(f"A throughput curve has the times {list(throughput.seconds)}: give seconds above 0.")
    slope = max(0.0, (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])) if len(xs) > 1 else 0.0
    return np.interp(batches, xs, ys) + slope * np.maximum(np.subtract(batches, xs[-1]), 0.0)


def batch_seconds(throughput: Throughput, slots: int, most: int) -> Floats:
    """Seconds in which each of 0, 1, .. `most` samples gains one token [most + 1]; 0 for none.

    More than `slots` samples are treated as if they shared the slots in turns (processor sharing), at the throughput of
    a full batch. In reality they wait for a slot. The engine's total time is the same; only the order in which samples
    finish differs.
    """
    batches = np.arange(1.0, most + 1)
    turns = np.maximum(batches / slots, 1.0)
    return np.append(0.0, turns * seconds_per_token(throughput, np.minimum(batches, slots)))


def decay_seconds(throughput: Throughput, remaining: Floats, slots: int) -> float:
    """Seconds until samples with these remaining tokens [k] have all finished, decoded as one shrinking batch.

    i samples decode while the i-th longest is the shortest one left, at T(i) seconds per token. With r_i the i-th
    largest of `remaining`, the sum is sum_i (r_i - r_{i+1}) T(i). For more than `slots` samples see `batch_seconds`.
    """
    seconds = batch_seconds(throughput, slots, len(remaining))
    return float(np.sort(remaining)[::-1] @ np.diff(seconds))


class Decay:
    """How each engine finishes its samples, and how this changes if samples are added or removed.

    With r_i the i-th largest of an engine's remaining tokens, it finishes after sum_i r_i (T(i) - T(i - 1)) seconds.
    This is linear in r, so prefix sums give the effect of adding or removing one sample, for all samples and engines at
    once. `insert` and `remove` recompute only the engines concerned.

    Args:
        at: [N] engine (index) of each sample.
        remaining: [N] remaining tokens, above 0.
        present: [k] samples that are inserted at the start, ascending.
        spare: room for so many samples beyond those of the fullest engine, at least 1.

    Attributes:
        samples: [engines, width] indices of samples by falling `remaining`, then by index; N where there is none.
        remaining: [engines, width] tokens of these samples, 0 where there is none.
        counts: [engines] number of samples.
        finish: [engines] seconds until all samples have finished.
        finish_without: [engines, width] the same if the sample at this place were removed.
    """

    def __init__(self, engines: Sequence[EngineState], at: Ints, remaining: Floats, present: Ints, spare: int) -> None:
        homes = at[present]
        self.counts = np.bincount(homes, minlength=len(engines))
        self.width = int(self.counts.max()) + max(spare, 1)
        self._tokens = np.append(remaining, 0.0)
        order = np.argsort(-remaining[present], kind="stable")
        few_bits = np.min_scalar_type(len(engines))  # numpy sorts short integers in linear time
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
        self._weights = np.diff(self._seconds)  # [engines, width + 1] T(i) - T(i - 1), from the longest sample on
        self.remaining = np.zeros(self.samples.shape)
        self.finish = np.zeros(len(engines))
        self.finish_without = np.zeros(self.samples.shape)
        # [engines, width + 1] prefix sums. Seconds due to the samples before each place;
        self._before = np.zeros((len(engines), self.width + 1))
        # due to the samples before each place but the first, if each were one place further up;
        self._moved_up = np.zeros((len(engines), self.width + 1))
        # due to the samples from each place on, if each were one place further down.
        self._moved_down = np.zeros((len(engines), self.width + 1))
        self._compute(np.arange(len(engines)))

    def least_makespan(self) -> float:
        """Lower bound: the longest sample alone, and all tokens at the best rate on every engine."""
        seconds = self._seconds[:, 1:]
        rate = 1.0 / (seconds / np.arange(1.0, seconds.shape[1] + 1)).min()
        work = float(self.remaining.sum()) / (rate * len(seconds))
        return max(work, float(self.remaining.max()) * float(seconds.min()))

    def insertion_places(self, engines: Ints, remaining: Floats) -> Ints:
        """Places [k, n] at which samples with so many tokens [k, n] would be inserted on engines [k], after equals."""
        width, shift = self.width, np.arange(len(engines))[:, None]
        rows = self.remaining[engines]
        # One search in all rows: an offset per row keeps the concatenated rows sorted.
        lift = shift * (max(float(rows.max(initial=0.0)), float(remaining.max(initial=0.0))) + 1.0)
        found = np.searchsorted((lift - rows).ravel(), (lift - remaining).ravel(), side="right")
        return found.reshape(remaining.shape) - shift * width

    def finish_with(self, engines: Ints, remaining: Floats) -> Floats:
        """Seconds [k, n] until each engine [k] has finished if one sample with so many tokens [k, n] were added."""
        places, rows = self.insertion_places(engines, remaining), engines[:, None]
        return self._before[rows, places] + remaining * self._weights[rows, places] + self._moved_down[rows, places]

    def finish_exchanged(self, one: int, columns: Ints, others: Ints, other_columns: Ints) -> tuple[Floats, Floats]:
        """Seconds [k, c, d] until engine `one`, and until each other [k], has finished if two samples were exchanged.

        Valid only where the sample of `one` (columns [c]) is longer than that of the other (columns [k, d]).
        """
        longer, shorter = self.remaining[one, columns], self.remaining[others[:, None], other_columns]
        places = np.maximum(self.insertion_places(np.full(len(others), one), shorter), 1)[:, None, :]
        columns, other_columns = columns[:, None], other_columns[:, None, :]
        first = self._before[one, columns] + self._moved_up[one, places] - self._moved_up[one, columns + 1]
        first = first + shorter[:, None, :] * self._weights[one, places - 1]
        first += self.finish[one] - self._before[one, places]
        places = self.insertion_places(others, np.broadcast_to(longer, (len(others), len(longer))))[:, :, None]
        others = others[:, None, None]
        second = self._before[others, places] + longer[:, None] * self._weights[others, places]
        second = second + self._moved_down[others, places] - self._moved_down[others, other_columns]
        second += self.finish[others] - self._before[others, other_columns + 1]
        return first, second

    def remove(self, engines: Ints, columns: Ints) -> Ints:
        """Remove one sample from each of several different engines [k], at these columns; returns the samples [k]."""
        taken = self.samples[engines, columns]
        steps = np.arange(self.width)
        kept = np.minimum(steps + (steps >= columns[:, None]), self.width - 1)
        rows = np.take_along_axis(self.samples[engines], kept, axis=1)
        rows[:, -1] = len(self._tokens) - 1
        self.samples[engines] = rows
        self.counts[engines] -= 1
        self._compute(engines)
        return taken

    def insert(self, engines: Ints, samples: Ints) -> None:
        """Insert one sample into each of several different engines [k] that hold fewer than `width`."""
        places = self.insertion_places(engines, self._tokens[samples][:, None])
        steps = np.arange(self.width)
        rows = np.take_along_axis(self.samples[engines], np.maximum(steps - (steps > places), 0), axis=1)
        np.put_along_axis(rows, places, samples[:, None], axis=1)
        self.samples[engines] = rows
        self.counts[engines] += 1
        self._compute(engines)

    def ends(self) -> Floats:
        """Seconds [engines, width] until each sample has finished; 0 where there is none."""
        return self.remaining * self._seconds[:, 1 : self.width + 1] + (self.finish[:, None] - self._before[:, 1:])

    def progress(self, ends: Floats, seconds: float) -> Floats:
        """Tokens [engines] that each unfinished sample of an engine has gained after so many seconds.

        `ends` is the result of `ends()`.
        """
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
        self._before[engines], self._moved_up[engines] = before, earlier
        self._moved_down[engines] = later[:, -1:] - later
        self.finish[engines] = before[:, -1]
        self.finish_without[engines] = before[:, :-1] + earlier[:, -1:] - earlier[:, 1:]


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
    fixed_depth: bool = False,
    modes: ModeChoice | None = None,
) -> Throughput:
    """Predicted throughput of an engine at batches 1, 2, 4, .. and `slots`, with drafting where it is forecast to pay.

    Args:
        acceptance: of the engine's draft; None: it has none, and the arguments from `temperature` on are not used.
        length: tokens of prompt and response of a typical sample.
        width, depth, max_nodes: of the drafting policy.
        fixed_depth: see `ModeChoice`.
        modes: of the engine's policy: gains that were measured count instead of forecasts. What history gives is not
            forecast: where it was not measured, it is taken to be what it is over all batch sizes.
    """
    forecast = Forecast(acceptance, width, depth) if acceptance else None
    batches = tuple(sorted({*(2**k for k in range(slots.bit_length())), slots}))
    seconds = []
    for size in batches:
        kv_tokens = size * length
        plain = rate = size / float(cost.verify_seconds(size, kv_tokens, size))
        if modes:
            rate *= max(1.0, modes.measured(size, RECALLED) or modes.overall(RECALLED))
        if forecast:
            ones = np.ones(size, np.int64)
            batch = Batch(ones * length, ones * length, ones, np.full(size, temperature), size, np.arange(size))
            drafting = plain * modes.measured(size, DRAFTED) if modes else 0.0
            drafting = drafting or drafting_rate(forecast.for_batch(batch), cost, batch, depth, max_nodes, fixed_depth)
            rate = drafting if drafting > MARGIN * rate else rate
        seconds.append(size / rate)
    return Throughput(batches, tuple(seconds))
