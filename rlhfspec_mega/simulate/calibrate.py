"""Makes cost curves for the simulation from measurements of a real run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.planning.regression import isotonic_regression
from rlhfspec_mega.simulate.curves import CostCurves, DecodeCurve, MigrationTimes, check_curves
from rlhfspec_mega.types import Span

LARGEST_KV_PART = 0.9  # largest share of a step's time that reading the KV cache may explain
LONGEST_PAUSE = 0.02  # seconds; longest pause between two spans of an engine that only waits for its next call


@dataclass(frozen=True)
class DecodeSample:
    """Consecutive decode steps of one engine with an unchanged batch.

    Attributes:
        kv_tokens: mean tokens in the KV cache, of all samples together.
        seconds: time of the engine without prefill and migration copies. The time that the engine spends on reports and
            on waiting for the driver's next call is included, because it is part of the makespan.
        tokens: gained by all samples together.
    """

    batch: int
    kv_tokens: float
    steps: int
    seconds: float
    tokens: int


@dataclass(frozen=True)
class Measurements:
    """Measurements of a real run.

    Attributes:
        run: description of the run and its machine, which is kept with the curves.
        slots, kv_tokens: as in CostCurves.
        plain, drafting: decode steps without and with a draft; `drafting` may be empty.
        prefill_tokens, prefill_seconds: totals.
        scoring_tokens, scoring_seconds: totals.
        scoring_start: seconds before an engine's first score.
        copied_tokens, copy_seconds: totals of stage one; 0 if nothing migrated, and migration then costs nothing.
        downtimes: seconds of each stage two.
        source_rate_during_copy: decode rate of an engine during copies, divided by its rate without.
    """

    run: str
    slots: int
    kv_tokens: int
    plain: Sequence[DecodeSample]
    drafting: Sequence[DecodeSample]
    prefill_tokens: int
    prefill_seconds: float
    scoring_tokens: int
    scoring_seconds: float
    scoring_start: float
    copied_tokens: int
    copy_seconds: float
    downtimes: Sequence[float]
    source_rate_during_copy: float


def calibrate(records: Measurements) -> CostCurves:
    """Cost curves of a real engine. Raises UserError if decoding was not measured or measurements are impossible."""
    if not records.plain:
        raise UserError("A calibration needs decode steps without a draft: measure some at several batch sizes.")
    curves = CostCurves(
        name=records.run,
        source={
            "kind": "measured",
            "run": records.run,
            "decode_steps": sum(sample.steps for sample in (*records.plain, *records.drafting)),
            "migrations": len(records.downtimes),
        },
        slots=records.slots,
        kv_tokens=records.kv_tokens,
        plain=decode_curve(records.plain),
        drafting=decode_curve(records.drafting) if records.drafting else None,
        prefill_seconds=records.prefill_seconds / max(records.prefill_tokens, 1),
        scoring_seconds=records.scoring_seconds / max(records.scoring_tokens, 1),
        scoring_start=records.scoring_start,
        migration=MigrationTimes(
            downtime=statistics.median(records.downtimes) if records.downtimes else 0.0,
            copy_seconds=records.copy_seconds / max(records.copied_tokens, 1),
            copy_share=max(1.0 - records.source_rate_during_copy, 0.0),
        ),
    )
    try:
        check_curves(curves)
    except ValueError as error:
        raise UserError(f"These measurements are impossible ({error}): measure again.") from None
    return curves


def decode_samples(spans: Sequence[Span]) -> list[DecodeSample]:
    """The decode samples among the spans of one engine, which are in order of time (`EngineReport.spans`).

    A short pause before the next span, in which the engine reports and is called again, belongs to the sample. In a
    longer pause the engine had nothing to do. Spans that were joined with others are left out.
    """
    found = []
    for place, span in enumerate(spans):
        if span.name != "decode":
            continue
        following = spans[place + 1].start if place + 1 < len(spans) else math.inf
        pause = max(following - span.start - span.seconds, 0.0)
        steps, batch, tokens, kv = (float(span.arguments[name]) for name in ("steps", "batch", "tokens", "kv_tokens"))
        seconds = span.seconds + (pause if pause <= LONGEST_PAUSE else 0.0)
        found.append(DecodeSample(int(batch), kv / steps, int(steps), seconds, int(tokens)))
    return found


def decode_curve(samples: Sequence[DecodeSample]) -> DecodeCurve:
    """Fit decode times by least squares: seconds per step = s(batch) + c * kv_tokens.

    Seconds per token are these divided by the tokens per step of each batch size. Measurements are weighted by their
    number of steps. c is not negative, and limited so that s(batch) is at least a tenth of the step's time. Seconds per
    token never fall as the batch grows (isotonic regression). The curve has points at the measured batch sizes, and one
    at batch 1, which gets the values of the smallest measured batch.
    """
    given = np.array([s.batch for s in samples])
    steps = np.array([s.steps for s in samples], np.float64)
    step_seconds, kv = np.array([(s.seconds / s.steps, s.kv_tokens) for s in samples]).T
    batches, index = np.unique(given, return_inverse=True)
    weights = np.bincount(index, steps)
    mean_seconds, mean_kv = (np.bincount(index, steps * values) / weights for values in (step_seconds, kv))
    # The slope within batches is the c of the regression on batches and KV together (Frisch and Waugh 1933).
    kv_apart, seconds_apart = kv - mean_kv[index], step_seconds - mean_seconds[index]
    variance = float(steps @ kv_apart**2)
    slope = float(steps @ (kv_apart * seconds_apart)) / variance if variance > 0 else 0.0
    slope = min(max(slope, 0.0), LARGEST_KV_PART * float((mean_seconds / np.maximum(mean_kv, 1.0)).min()))
    per_step = np.bincount(index, [s.tokens for s in samples]) / (batches * weights)
    seconds = isotonic_regression((mean_seconds - slope * mean_kv) / per_step, weights.astype(np.float64)).tolist()
    points = list(zip(batches.tolist(), seconds, (slope / per_step).tolist(), strict=True))
    if batches[0] > 1:
        points.insert(0, (1, *points[0][1:]))
    return DecodeCurve(*zip(*points, strict=True))
