"""The simulator against reality: calibrated on one scenario of the rollout benchmark, it predicts the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.paired import Interval, ratio_interval
from benchmarks.rollout_fleet import MECHANISMS, POLL_SECONDS, SHIPPED, SLOTS, Outcome, Recorder
from rlhfspec_mega.simulate.calibrate import Measurements, calibrate, decode_samples
from rlhfspec_mega.simulate.curves import CostCurves
from rlhfspec_mega.simulate.mechanisms import MECHANISMS as SIMULATED
from rlhfspec_mega.simulate.mechanisms import simulate
from rlhfspec_mega.simulate.workload import Workload
from rlhfspec_mega.types import GenerationRequest


def curves_of(recorder: Recorder, positions: int, copy_seconds: float, source_rate: float) -> CostCurves:
    """Cost curves from what the engines of one scenario did.

    Args:
        positions: of a slot's KV cache.
        copy_seconds: to copy one token's KV, while nothing else is done.
        source_rate: decode rate of an engine during copies over its rate without, as measured.
    """
    spans = [span for rank in sorted(recorder.spans) for span in recorder.spans[rank]]

    def total(name: str) -> tuple[int, float]:
        named = [span for span in spans if span.name == name]
        return sum(int(span.arguments["tokens"]) for span in named), sum(span.seconds for span in named)

    (prefilled, prefill_seconds), (scored, scoring_seconds) = total("prefill"), total("score")
    share = max(1.0 - source_rate, 0.01)
    return calibrate(
        Measurements(
            run="rollout benchmark",
            slots=SLOTS,
            kv_tokens=SLOTS * positions,
            plain=[sample for rank in sorted(recorder.spans) for sample in decode_samples(recorder.spans[rank])],
            drafting=[],
            prefill_tokens=prefilled,
            prefill_seconds=prefill_seconds,
            scoring_tokens=scored,
            scoring_seconds=scoring_seconds,
            scoring_start=0.0,
            copied_tokens=1,
            copy_seconds=copy_seconds / share,
            downtimes=[move.downtime for move in recorder.moves if move.settled_bytes],
            source_rate_during_copy=1.0 - share,
        )
    )


def workload_of(requests: Sequence[GenerationRequest], limit: int) -> Workload:
    """The same samples for the simulator, in the same order."""
    groups = {group: number for number, group in enumerate(dict.fromkeys(r.group_id for r in requests))}
    return Workload(
        np.array([groups[request.group_id] for request in requests], np.int64),
        np.array([len(request.prompt_tokens) for request in requests], np.int64),
        np.array([request.max_new_tokens for request in requests], np.int64),
        limit,
    )


def predict(
    curves: CostCurves, workloads: Sequence[Workload], outcomes: Mapping[str, Sequence[Outcome]]
) -> dict[str, dict[str, Interval]]:
    """By mechanism: simulated over real seconds of the rollout, and of it with scoring.

    Args:
        workloads: of every repeat, the warm-up first, from which only lengths are learnt.
        outcomes: of the repeats after it.
    """
    found = {}
    for mechanism in MECHANISMS:
        real = outcomes[mechanism]
        simulated = [
            simulate(
                SIMULATED[mechanism.replace(" ", "")],
                workload,
                2,
                curves,
                start="even",  # as dealt: a skewed start lies in the order of the samples
                plan_seconds=POLL_SECONDS,
                earlier=workloads[:repeat],
                least_gain=SHIPPED.least_gain,
                cool_down=SHIPPED.cool_down,
            )
            for repeat, workload in enumerate(workloads[: len(real) + 1])
            if repeat > 0
        ]
        found[mechanism] = {
            "rollout": ratio_interval([one.makespan for one in simulated], [one.rollout for one in real]),
            "total": ratio_interval([one.makespan_with_scoring for one in simulated], [one.total for one in real]),
        }
    return found


def worst_error(predictions: Sequence[Mapping[str, Mapping[str, Any]]]) -> float:
    """The largest share by which a predicted makespan, with scoring or without, is off, of mechanisms' medians."""
    return max(abs(each["value"] - 1.0) for one in predictions for found in one.values() for each in found.values())


def print_predictions(law: str, start: str, predictions: Mapping[str, Mapping[str, Interval]]) -> None:
    """One line per mechanism."""
    print(f"{law} lengths, {start} start: simulated over real seconds", flush=True)
    for mechanism, found in predictions.items():
        print(f"  {mechanism:<22} rollout {found['rollout']}  with scoring {found['total']}", flush=True)
