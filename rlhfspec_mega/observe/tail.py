"""What was done about the long tail of rollouts, as metrics of a step and as figures of a run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rlhfspec_mega.types import TailTally

REFRESH = "fused_refresh_seconds"  # of the draft, in freed time
_SUMS = ("migrations", "fused_tasks", "fused_seconds", "freed_device_seconds")


def tail_metrics(tally: TailTally) -> dict[str, float]:
    """Metrics of one rollout; `migration_downtime` is the median in seconds, missing where nothing moved."""
    metrics = {name: float(getattr(tally, name)) for name in _SUMS}
    return metrics | ({"migration_downtime": statistics.median(tally.downtimes)} if tally.downtimes else {})


def tail_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The sums over some steps, and the median of their downtimes; empty where none were recorded."""
    if not any(name in row for row in rows for name in _SUMS):
        return {}
    figures = {name: float(sum(row.get(name, 0.0) for row in rows)) for name in (*_SUMS, REFRESH)}
    downtimes = [row["migration_downtime"] for row in rows if row.get("migration_downtime") is not None]
    return figures | ({"migration_downtime": statistics.median(downtimes)} if downtimes else {})


def tail_in_words(figures: Mapping[str, Any]) -> str:
    """One sentence for the summary."""
    words = f"{figures['migrations']:.0f} samples moved between engines"
    if "migration_downtime" in figures:
        words += f" (each was decoded nowhere for {1000 * figures['migration_downtime']:.0f} ms)"
    words += f"; engines without samples had {figures['freed_device_seconds']:.1f} s to spare"
    if figures["fused_tasks"]:
        words += f" and scored {figures['fused_tasks']:.0f} finished samples in {figures['fused_seconds']:.1f} s of it"
    if figures.get(REFRESH):
        words += f"; the draft was refreshed for {figures[REFRESH]:.1f} s on devices without engines at work"
    return words + "."
