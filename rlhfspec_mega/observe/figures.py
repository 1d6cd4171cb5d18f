"""Speculation and the long tail in numbers: metrics of a step and figures of a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rlhfspec_mega.observe.gains import gain_figures, gain_metrics
from rlhfspec_mega.observe.metrics import DRAFT, REALLOCATION, SPECULATION
from rlhfspec_mega.types import TALLY_EDGES, DraftingTally, TailTally

BY_VERIFIED = [
    *("0", "1", "2"),
    *(f"{low + 1}-{high}" for low, high in pairwise(TALLY_EDGES[2:])),
    f"over {TALLY_EDGES[-1]}",
]
_SUMS = (
    *("sample_steps", "drafted_sample_steps", "verified", "accepted", "recalled"),
    *("paired_seconds", "paired_plain_seconds"),
)

REFRESH = "fused_refresh_seconds"  # of the draft, in freed time; its metric is in the group DRAFT
_TAIL_SUMS = ("migrations", "fused_tasks", "fused_seconds", "freed_device_seconds")
_DOWNTIME = "migration_downtime"


def verified_name(label: str) -> str:
    """The metric, without its group, that counts sample steps with this number of verified draft tokens."""
    return f"steps_verified_{label.replace(' ', '_')}"


def drafting_metrics(tallies: Sequence[DraftingTally]) -> dict[str, float]:
    """Metrics from the engines' tallies of one rollout; {} without drafts.

    They are sums, the ratios of `drafting_figures`, and the accuracy of predictions: see observe.metrics.
    """
    if not tallies:
        return {}
    metrics = {SPECULATION + name: float(sum(getattr(tally, name) for tally in tallies)) for name in _SUMS}
    for place, label in enumerate(BY_VERIFIED):
        metrics[SPECULATION + verified_name(label)] = float(
            sum(tally.sample_steps_by_verified[place] for tally in tallies)
        )
    metrics |= gain_metrics(tallies)
    figures = drafting_figures([metrics])
    metrics |= {SPECULATION + name: one for name, one in figures.items() if isinstance(one, float)}
    metrics[SPECULATION + "collapsed_drafts"] = float(sum(tally.collapsed_rate is not None for tally in tallies))
    errors = [tally.calibration_error for tally in tallies if tally.calibration_error is not None]
    if errors:
        metrics[SPECULATION + "calibration_error"] = sum(errors) / len(errors)
    realised = sum(tally.realised_accepted for tally in tallies)
    if realised > 0:
        metrics[SPECULATION + "predicted_over_realised"] = sum(tally.predicted_accepted for tally in tallies) / realised
    return metrics


def drafting_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of some steps from the sums in their metrics; {} without drafts.

    Figures that were not measured are left out.

    Returns:
        tokens_per_step (accepted + 1, per sample), accepted_length (per step of a sample with draft tokens),
        verified_per_accepted (draft tokens), share_recalled (of the accepted ones), speedup_vs_plain (against the
        control steps), speedup_error (its standard error, from how it varies between steps), share_by_verified, and
        those of `gain_figures`.
    """
    names = (*_SUMS, *map(verified_name, BY_VERIFIED))
    sums = {name: sum(row.get(SPECULATION + name, 0.0) for row in rows) for name in names}
    steps = sums["sample_steps"]
    if not steps:
        return {}
    figures: dict[str, Any] = {"tokens_per_step": 1.0 + sums["accepted"] / steps}
    if sums["drafted_sample_steps"]:
        figures["accepted_length"] = sums["accepted"] / sums["drafted_sample_steps"]
    if sums["accepted"]:
        figures["verified_per_accepted"] = sums["verified"] / sums["accepted"]
        figures["share_recalled"] = sums["recalled"] / sums["accepted"]
    if sums["paired_seconds"]:
        figures["speedup_vs_plain"] = sums["paired_plain_seconds"] / sums["paired_seconds"]
        error = _ratio_error(rows, "paired_plain_seconds", "paired_seconds")
        figures |= {} if error is None else {"speedup_error": error}
    figures |= gain_figures(rows)
    return figures | {"share_by_verified": {label: sums[verified_name(label)] / steps for label in BY_VERIFIED}}


def _ratio_error(rows: Sequence[Mapping[str, Any]], above: str, below: str) -> float | None:
    """Standard error of a ratio of sums over rows, by the jackknife (Efron 1982); None where fewer than two have it."""
    pairs = [(row[SPECULATION + above], row[SPECULATION + below]) for row in rows if row.get(SPECULATION + below)]
    if len(pairs) < 2:
        return None
    top, bottom = (sum(values) for values in zip(*pairs, strict=True))
    without = [(top - a) / (bottom - b) for a, b in pairs]
    mean = sum(without) / len(pairs)
    return math.sqrt((len(pairs) - 1) / len(pairs) * sum((one - mean) ** 2 for one in without))


def shares_in_words(metrics: Mapping[str, float]) -> str:
    """How often each number of draft tokens was verified per sample, from a step's metrics; "" without drafts."""
    shares = drafting_figures([metrics]).get("share_by_verified", {})
    parts = [f"{label}: {share:.0%}" for label, share in shares.items() if share >= 0.005]
    return "draft tokens per sample and step  " + "  ".join(parts) if parts else ""


def collapse_notes(tallies: Sequence[DraftingTally]) -> list[str]:
    """One sentence for each engine whose draft no longer fits."""
    return [
        f"WARNING: the draft's first token is accepted in {tally.collapsed_rate:.0%} of the cases on an engine where "
        f"{tally.usual_rate:.0%} was usual: the draft no longer fits. It is not used there until the next "
        "weight update (the torch engine goes on drafting under trainer.deterministic); no sample is affected."
        for tally in tallies
        if tally.collapsed_rate is not None and tally.usual_rate is not None
    ]


def tail_metrics(tally: TailTally) -> dict[str, float]:
    """Metrics of one rollout; `migration_downtime` is the median in seconds, missing if nothing migrated."""
    metrics = {REALLOCATION + name: float(getattr(tally, name)) for name in _TAIL_SUMS}
    return metrics | ({REALLOCATION + _DOWNTIME: statistics.median(tally.downtimes)} if tally.downtimes else {})


def tail_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Sums over some steps, and the median of their downtimes; {} if none were recorded."""
    names = {name: REALLOCATION + name for name in _TAIL_SUMS}
    if not any(metric in row for row in rows for metric in names.values()):
        return {}
    names[REFRESH] = DRAFT + REFRESH
    figures = {name: float(sum(row.get(metric, 0.0) for row in rows)) for name, metric in names.items()}
    downtimes = [time for row in rows if (time := row.get(REALLOCATION + _DOWNTIME)) is not None]
    return figures | ({_DOWNTIME: statistics.median(downtimes)} if downtimes else {})


def tail_in_words(figures: Mapping[str, Any]) -> str:
    """A sentence about the long tail for the summary."""
    words = f"{figures['migrations']:.0f} samples moved between engines"
    if _DOWNTIME in figures:
        words += f" (each was decoded nowhere for {1000 * figures[_DOWNTIME]:.0f} ms)"
    words += f"; engines without samples had {figures['freed_device_seconds']:.1f} s to spare"
    if figures["fused_tasks"]:
        words += f" and scored {figures['fused_tasks']:.0f} finished samples in {figures['fused_seconds']:.1f} s of it"
    if figures.get(REFRESH):
        words += f"; the draft was refreshed for {figures[REFRESH]:.1f} s on devices without engines at work"
    return words + "."
