"""Seconds of a decode step: of drafting, and of verification with everything else."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlhfspec_mega.compiled import compiled
from rlhfspec_mega.planning.regression import RecursiveRegression, isotonic_regression
from rlhfspec_mega.planning.tree import Floats, Ints, StepRecord

# Ratios of 4/3 and 3/2, or 2. For a machine with known cost steps (CUDA graph sizes, tiles), other knots may be passed.
VERIFY_KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
DRAFT_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
FAR_KNOT = 1e7  # curves continue as straight lines from the last knot up to here
MIN_SECONDS = 1e-7
# Seconds of a pass and of each token in it, first of the target, then of the draft: used before anything is measured.
DEFAULT_SECONDS = (1e-2, 1e-3, 2e-3, 2e-4)
SMOOTHNESS = 0.2  # weight of a bend in a curve, relative to one measurement; interpolates where nothing was measured
# Weight that pulls coefficients other than curves to 0, so that what batch and tokens both explain counts as tokens.
SHRINKAGE = 0.03


@dataclass(frozen=True)
class StepCost:
    """One measured decode step.

    Attributes:
        kv_tokens: tokens in the batch's KV caches.
        tokens: tokens that the target read: one per sample, and its draft tokens.
        backlog: tokens that the draft read in its first pass.
        depth: drafted layers; 0 for a plain step, whose draft_seconds are ignored.
        drafted: number of nodes that the draft's other depth - 1 passes ran on, all together.
    """

    batch: int
    kv_tokens: int
    tokens: int
    backlog: int
    depth: int
    drafted: int
    draft_seconds: float
    verify_seconds: float


def step_cost(record: StepRecord) -> StepCost:
    """The measurement that a decode step provides."""
    batch, tree = record.batch, record.tree
    return StepCost(
        batch=batch.size,
        kv_tokens=batch.kv_tokens,
        tokens=batch.size + len(record.chosen),
        backlog=batch.backlog,
        depth=tree.depth,
        drafted=record.drafted,
        draft_seconds=record.draft_seconds,
        verify_seconds=record.verify_seconds,
    )


class CostModel:
    """Predicts seconds of drafting and verification, from a profile and from every step since.

        plain  = plain_curve(batch) + a * kv_tokens
        verify = curve(tokens) + b * batch + c * kv_tokens + d * [any draft tokens] + e * tokens * kv_tokens / batch,
                 with draft tokens at least `plain`
        draft  = first(samples) + a * further tokens + (depth - 1) * later(nodes per pass) + c * depth * kv_tokens

    The draft's first pass reads the backlog: of each sample one token whose output is needed, and further ones, of
    which keys and values are enough. Verification's last term is attention where computing it takes time, as on a CPU:
    each token meets the KV of its sample. Plain steps have a model of their own: what verification costs beside is not
    the same at every size, and gains are measured in their seconds. Curves are piecewise linear between knots (hat
    functions), so they can follow both the nearly straight line of a CPU and the floor, knee, slope and steps of a GPU.
    Predictions are above 0 and never fall as tokens, backlog, nodes or depth grow: curves are made monotone by isotonic
    regression, where values that were measured often change least, and the other coefficients are kept at 0 or above.

    Attributes:
        frozen: whether `observe` is ignored, for runs that must not depend on the clock.
    """

    def __init__(
        self,
        frozen: bool = False,
        verify_knots: Sequence[int] = VERIFY_KNOTS,
        draft_knots: Sequence[int] = DRAFT_KNOTS,
    ) -> None:
        """Knots are ascending; a jump in cost after k tokens is represented by knots at k and k + 1.

        Until `fit`, `observe` or `load_state_dict`, the costs are those of a small model on a small machine.
        """
        self.frozen = frozen
        self._set_knots(verify_knots, draft_knots)
        self._set_curves(*DEFAULT_SECONDS)

    @classmethod
    def nominal(
        cls,
        parameters: int,
        draft_parameters: int,
        flops_per_second: float = 5e10,
        bytes_per_second: float = 1e10,
        parameter_bytes: int = 4,
        pass_seconds: float = 2e-4,
    ) -> CostModel:
        """A frozen model from a roofline: a pass reads all weights once and computes 2 FLOP per weight and token.

        The defaults resemble one CPU core in fp32. `pass_seconds` is the fixed overhead of a pass.
        """
        model = cls(frozen=True)
        per_token = 2.0 / flops_per_second
        per_pass = parameter_bytes / bytes_per_second
        model._set_curves(
            pass_seconds + parameters * per_pass,
            parameters * per_token,
            pass_seconds + draft_parameters * per_pass,
            draft_parameters * per_token,
        )
        return model

    def verify_seconds(self, batch: int, kv_tokens: int, tokens: int | Floats) -> Floats:
        """Seconds of a step without drafting. `tokens` may be an array of candidates; the result has its shape."""
        added, per_token = self._beside_curve(batch, kv_tokens)
        plain = self.plain_seconds(batch, kv_tokens)
        seconds = np.interp(tokens, self._verify_x, self._verify_y) + np.multiply(tokens, per_token) + added
        return np.where(np.greater(tokens, batch), np.maximum(seconds, plain), plain)

    def verify_seconds_up_to(self, batch: int, kv_tokens: int, count: int) -> Floats:
        """Seconds [count] of a step that verifies 0, 1, .. count - 1 draft tokens: `verify_seconds`, but quicker."""
        added, per_token = self._beside_curve(batch, kv_tokens)
        plain = self.plain_seconds(batch, kv_tokens)
        return _line(self._verify_x, self._verify_y, batch, count, added, per_token, plain)

    def _beside_curve(self, batch: int, kv_tokens: int) -> tuple[float, float]:
        """What verification takes beside the curve: seconds of the step, and of each token."""
        b, c, drafting, e = self._verify_rest
        return b * batch + c * kv_tokens + drafting, e * kv_tokens / batch

    def plain_seconds(self, batch: int, kv_tokens: int) -> float:
        """Seconds of a plain step."""
        (a,) = self._plain_rest
        return max(_interpolate(self._verify_xs, self._plain_line, batch) + a * kv_tokens, MIN_SECONDS)

    def plain_seconds_of(self, batches: Ints, kv_tokens: Ints) -> Floats:
        """The same of several batches."""
        (a,) = self._plain_rest
        return np.maximum(np.interp(batches, self._verify_x, self._plain_line) + a * kv_tokens, MIN_SECONDS)

    def draft_seconds(
        self, batch: int, kv_tokens: int, backlog: int, depth: int | Floats, drafted: int | Floats
    ) -> Floats:
        """Seconds of drafting `depth` layers; 0 for depth 0. `depth` and `drafted` may be arrays that broadcast."""
        first, each, _, _ = self.draft_prices(batch, kv_tokens, backlog)
        later_passes = np.maximum(np.subtract(depth, 1), 0)
        nodes = np.divide(drafted, np.maximum(later_passes, 1))
        later = later_passes * np.interp(nodes, self._draft_x, self._later_y)
        seconds = first + later + each * np.asarray(depth)
        return np.where(np.greater(depth, 0), np.maximum(seconds, MIN_SECONDS), 0.0)

    def draft_seconds_scalar(self, batch: int, kv_tokens: int, backlog: int, depth: int, drafted: int) -> float:
        """The same as `draft_seconds` for scalars, in a tenth of the time, as it is called several times per step."""
        if depth == 0:
            return 0.0
        seconds = self._first_pass(batch, backlog) + self._draft_rest[1] * kv_tokens * depth
        if depth > 1:
            seconds += (depth - 1) * _interpolate(self._draft_xs, self._draft_lines[1], drafted / (depth - 1))
        return max(seconds, MIN_SECONDS)

    def draft_prices(self, batch: int, kv_tokens: int, backlog: int) -> tuple[float, float, Floats, Floats]:
        """Seconds of the first pass, and of each layer beside that; nodes of a later pass, and its seconds."""
        return self._first_pass(batch, backlog), self._draft_rest[1] * kv_tokens, self._draft_x, self._later_y

    def _first_pass(self, batch: int, backlog: int) -> float:
        samples = min(batch, backlog)
        return _interpolate(self._draft_xs, self._draft_lines[0], samples) + self._draft_rest[0] * (backlog - samples)

    def fit(self, measurements: Sequence[StepCost]) -> None:
        """Replace what was learnt by a profile; the draft's costs are kept if the profile has none.

        Where it has no plain steps, all steps stand in for them. ValueError if it is empty.
        """
        if not measurements:
            raise ValueError("a cost model cannot be fitted to no measurements")
        plain = [m for m in measurements if _is_plain(m)] or measurements
        for some, row, regression in (
            (plain, self._plain_row, self._plain),
            (measurements, self._verify_row, self._verify),
        ):
            rows, targets = np.array([*map(row, some)]), np.maximum([m.verify_seconds for m in some], MIN_SECONDS)
            regression.fit(rows, targets, _prior(rows, targets, [self._verify_knots]))
        if drafts := [m for m in measurements if m.depth > 0]:
            if all(m.backlog < 2 * m.batch for m in drafts):  # nothing says what a further token of a sample costs
                drafts += [replace(m, batch=1) for m in drafts]  # as much as another sample
            rows = np.array([self._draft_row(m.batch, m.kv_tokens, m.backlog, m.depth, m.drafted) for m in drafts])
            targets = np.maximum([m.draft_seconds for m in drafts], MIN_SECONDS)
            self._draft.fit(rows, targets, _prior(rows, targets, [self._draft_knots] * 2))
        self._read_verify()
        self._read_draft()

    def observe(self, step: StepCost) -> None:
        """Learn from one step, unless frozen. Steps without measured times are ignored."""
        if self.frozen:
            return
        if step.verify_seconds > 0:
            scale = self._verify.observe(self._verify_row(step), step.verify_seconds)
            if _is_plain(step):
                self._plain.observe(self._plain_row(step), step.verify_seconds)
            elif step.tokens > step.batch:
                # Plain steps are seldom seen while drafting; a machine that has become slower is slower at them, too.
                self._plain.coefficients *= scale
            self._read_verify()
        if step.depth > 0 and step.draft_seconds > 0:
            row = self._draft_row(step.batch, step.kv_tokens, step.backlog, step.depth, step.drafted)
            self._draft.observe(row, step.draft_seconds)
            self._read_draft()

    def state_dict(self) -> dict[str, Any]:
        """All that was learnt, as plain data for JSON; `frozen` is not part of it."""
        return {
            "verify_knots": self._verify_knots.tolist(),
            "draft_knots": self._draft_knots.tolist(),
            "plain": self._plain.state_dict(),
            "verify": self._verify.state_dict(),
            "draft": self._draft.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._set_knots(state["verify_knots"], state["draft_knots"])
        self._set_curves(*DEFAULT_SECONDS)
        self._plain.load_state_dict(state["plain"])
        self._verify.load_state_dict(state["verify"])
        self._draft.load_state_dict(state["draft"])
        self._read_verify()
        self._read_draft()

    def _set_knots(self, verify_knots: Sequence[int], draft_knots: Sequence[int]) -> None:
        self._verify_knots = np.array(verify_knots, np.float64)
        self._draft_knots = np.array(draft_knots, np.float64)
        self._verify_x = np.append(self._verify_knots, FAR_KNOT)
        self._draft_x = np.append(self._draft_knots, FAR_KNOT)
        self._verify_xs, self._draft_xs = self._verify_x.tolist(), self._draft_x.tolist()

    def _set_curves(self, target_pass: float, target_token: float, draft_pass: float, draft_token: float) -> None:
        """Set all curves to straight lines, from seconds per pass and per token."""
        target = target_pass + target_token * self._verify_knots
        draft = draft_pass + draft_token * self._draft_knots
        self._plain = _weak_prior(np.append(target, np.zeros(1)), 1)
        # Without a profile e cannot be told from c.
        self._verify = _weak_prior(np.append(target, np.zeros(4)), 4, unlearnt=1)
        self._draft = _weak_prior(np.concatenate((draft, draft, [draft_token, 0.0])), 2)
        self._read_verify()
        self._read_draft()

    def _plain_row(self, step: StepCost) -> Floats:
        row = np.zeros(len(self._verify_knots) + 1)
        _set_hat_weights(row, 0, self._verify_knots, step.tokens, 1.0)
        row[-1] = step.kv_tokens
        return row

    def _verify_row(self, step: StepCost) -> Floats:
        row = np.zeros(len(self._verify_knots) + 4)
        _set_hat_weights(row, 0, self._verify_knots, step.tokens, 1.0)
        met = step.tokens * step.kv_tokens / step.batch
        row[-4:] = step.batch, step.kv_tokens, step.tokens > step.batch, met
        return row

    def _draft_row(self, batch: int, kv_tokens: int, backlog: int, depth: int, drafted: int) -> Floats:
        count, passes, samples = len(self._draft_knots), depth - 1, min(batch, backlog)
        row = np.zeros(2 * count + 2)
        _set_hat_weights(row, 0, self._draft_knots, samples, 1.0)
        if passes:
            _set_hat_weights(row, count, self._draft_knots, drafted / passes, passes)
        row[2 * count :] = backlog - samples, kv_tokens * depth
        return row

    def _read_verify(self) -> None:
        count = len(self._verify_knots)
        self._plain_line = _monotone(self._verify_knots, self._plain, 0).tolist()
        self._plain_rest = self._plain.coefficients[count:].tolist()
        self._verify_y = _monotone(self._verify_knots, self._verify, 0)
        self._verify_rest = self._verify.coefficients[count:].tolist()

    def _read_draft(self) -> None:
        count = len(self._draft_knots)
        self._first_y, self._later_y = (_monotone(self._draft_knots, self._draft, start) for start in (0, count))
        self._draft_lines = self._first_y.tolist(), self._later_y.tolist()
        self._draft_rest = self._draft.coefficients[2 * count :].tolist()


def _is_plain(step: StepCost) -> bool:
    """Whether nothing was drafted: a step whose draft tokens were all dropped takes longer."""
    return step.tokens == step.batch and step.depth == 0


@compiled
def _line(xs: Floats, ys: Floats, first: int, count: int, added: float, each: float, plain: float) -> Floats:
    """Linear interpolation at first, first + 1, ..., below `FAR_KNOT`, and what is added to it, also for each; `plain`
    at first."""
    found, right = np.empty(count), 0
    if count:
        found[0] = plain
    for place in range(1, count):
        value = first + place
        while xs[right] < value:
            right += 1
        seconds = ys[0]
        if right:
            share = (value - xs[right - 1]) / (xs[right] - xs[right - 1])
            seconds = ys[right - 1] + share * (ys[right] - ys[right - 1])
        found[place] = max(seconds + added + each * value, plain)
    return found


def _interpolate(xs: list[float], ys: list[float], value: float) -> float:
    """Linear interpolation of one value below `FAR_KNOT`, as numpy.interp; constant below the first of `xs`."""
    if value <= xs[0]:
        return ys[0]
    right = bisect_left(xs, value)
    share = (value - xs[right - 1]) / (xs[right] - xs[right - 1])
    return ys[right - 1] + share * (ys[right] - ys[right - 1])


def _set_hat_weights(row: Floats, start: int, knots: Floats, value: float, weight: float) -> None:
    """Write the weights of the two knots around `value` into a row; beyond the last knot, those of an extrapolation."""
    value = max(value, float(knots[0]))
    right = min(max(int(knots.searchsorted(value)), 1), len(knots) - 1)
    left_knot = float(knots[right - 1])
    share = (value - left_knot) / (float(knots[right]) - left_knot)
    row[start + right - 1], row[start + right] = weight * (1.0 - share), weight * share


def _weak_prior(coefficients: Floats, nonnegative: int, unlearnt: int = 0) -> RecursiveRegression:
    """A regression that starts from these coefficients with so weak a prior that its first observations decide.

    Args:
        coefficients: the first one is the seconds that every pass takes, and sets the scale of the prior.
        nonnegative: so many of the last coefficients are kept at 0 or above.
        unlearnt: so many of the last coefficients stay as they are.
    """
    covariance = np.eye(len(coefficients)) * (10.0 * coefficients[0]) ** 2
    covariance[len(coefficients) - unlearnt :] = 0.0
    return RecursiveRegression(coefficients, covariance, nonnegative)


def _monotone(knots: Floats, regression: RecursiveRegression, start: int) -> Floats:
    """The curve [K + 1] of the coefficients from `start` on: at least 0, never falling, with a value at `FAR_KNOT`."""
    own = slice(start, start + len(knots))
    curve = isotonic_regression(regression.coefficients[own], 1.0 / regression.variances[own])
    slope = (FAR_KNOT - float(knots[-1])) / (float(knots[-1]) - float(knots[-2]))
    return np.maximum(np.append(curve, curve[-1] + slope * (curve[-1] - curve[-2])), 0.0)


def _prior(rows: Floats, targets: Floats, curves: list[Floats]) -> Floats:
    """Prior information [k, k]: curves, which come first in a row, have no bends, and other coefficients are 0."""
    typical = float(np.median(targets))
    width = rows.shape[1]
    information = np.zeros((width, width))
    start = 0
    for knots in curves:
        gaps = np.diff(knots)
        for k in range(1, len(knots) - 1):
            bend = np.zeros(width)
            at = knots[k] / gaps[k - 1], knots[k] / gaps[k]
            bend[start + k - 1 : start + k + 2] = at[0], -at[0] - at[1], at[1]
            information += (SMOOTHNESS / typical) ** 2 * np.outer(bend, bend)
        start += len(knots)
    size = np.sqrt((rows**2).mean(axis=0)) * SHRINKAGE / typical
    size[:start] = 0.0
    return information + np.diag(size**2 + (1e-4 / typical) ** 2)
