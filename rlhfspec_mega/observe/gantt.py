"""Draws pipeline schedules: a row for each device, a bar for each forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhfspec_mega.observe.plot import drawing

_COLOURS = {(0, False): "#8ab6e8", (0, True): "#2f6db5", (1, False): "#f4c286", (1, True): "#d27a1e"}
_MOST_LABELS = 600  # more would overlap


@dataclass(frozen=True)
class Bar:
    """A task on a chart: seconds from the chart's left end, and the micro-batch as its label."""

    device: int
    start: float
    end: float
    model: int
    backward: bool
    micro_batch: int


def plot_schedules(path: Path, charts: Sequence[tuple[str, Sequence[Bar]]]) -> None:
    """Draw charts (title, bars) one below the other on the same axis of time, as a PNG."""
    devices = max(1 + bar.device for _, bars in charts for bar in bars)
    height = len(charts) * (1.1 + 0.32 * devices)
    with drawing(path, len(charts), 1, figsize=(14, height), sharex=True, squeeze=False) as (_, axes):
        for panel, (title, bars) in zip(axes[:, 0], charts, strict=True):
            for bar in bars:
                colour = _COLOURS[bar.model, bar.backward]
                width = bar.end - bar.start
                panel.barh(
                    bar.device, width, left=bar.start, height=0.9, color=colour, edgecolor="white", linewidth=0.4
                )
                if len(bars) <= _MOST_LABELS:
                    middle = (bar.start + bar.end) / 2
                    panel.text(middle, bar.device, str(bar.micro_batch), ha="center", va="center", fontsize=6)
            panel.set_title(title, fontsize=10)
            panel.set_yticks(range(devices), [f"device {device}" for device in range(devices)], fontsize=7)
            panel.invert_yaxis()
        axes[-1, 0].set_xlabel("seconds; light: forward, dark: backward; blue: model 0, orange: model 1")
