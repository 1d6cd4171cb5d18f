"""A picture of a run: reward, held-out accuracy, response length and time per phase over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhfspec_mega.observe.summary import PHASE_PREFIX

PLOT_FILE = "curves.png"


def plot_curves(directory: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Draw curves.png from the lines of metrics.jsonl; returns its path. Metrics that were not logged stay empty."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    phases = sorted({name for row in rows for name in row if name.startswith(PHASE_PREFIX)})
    panels = {
        "reward": ["reward", "exact"],
        "held-out exact": ["eval_exact"],
        "response length (tokens)": ["response_length_mean", "response_length_max"],
        "seconds per phase": phases,
    }
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), constrained_layout=True)
    for axis, (title, names) in zip(axes.flat, panels.items(), strict=True):
        for name in names:
            points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), marker=".", label=name.removeprefix(PHASE_PREFIX))
        axis.set_title(title)
        axis.set_xlabel("step")
        if axis.get_lines():
            axis.legend(fontsize="small")
    path = directory / PLOT_FILE
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
