"""Plots of a run: learning curves and time per phase over steps, and live samples of one rollout."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhfspec_mega.observe.metrics import TIMING

PLOT_FILE = "curves.png"
LIVE_FILE = "live_samples.png"
_WINDOW = 10  # steps
_NAMED = 32  # with more engines the names would overlap
_STRIP_INCHES, _MOST_INCHES = 0.25, 8.0


@contextmanager
def drawing(path: Path, *grid: int, **options: Any) -> Iterator[Any]:
    """What `pyplot.subplots` gives, saved as a PNG in the end; matplotlib is loaded only here."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(*grid, constrained_layout=True, **options)
    yield figure, axes
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot_curves(directory: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Draw curves.png from the lines of metrics.jsonl, of any task; returns its path."""
    logged = {name for row in rows for name in row if row[name] is not None}
    panels = {
        "reward": ["rollout/reward_mean", "rollout/exact_mean"],
        "held-out exact": ["val/exact_mean"],
        "response length (tokens)": ["rollout/response_length_mean", "rollout/response_length_max"],
        "explained variance of returns": ["critic/explained_variance"],
        "loss": ["sft/loss", "reward_model/loss", "val/loss"],
        "accuracy on pairs": ["reward_model/accuracy", "val/accuracy"],
        "seconds per phase": sorted(name for name in logged if name.startswith(TIMING)),
    }
    exact, reward = "rollout/exact_mean", "rollout/reward_mean"
    if all(row.get(exact) == row.get(reward) for row in rows):
        logged.discard(exact)  # it would hide the other curve
    shown = {title: [name for name in names if name in logged] for title, names in panels.items()}
    shown = {title: names for title, names in shown.items() if names}
    path, lines = directory / PLOT_FILE, max(1, -(-len(shown) // 2))
    with drawing(path, lines, 2, figsize=(11, 3.5 * lines), squeeze=False) as (_, axes):
        for axis in list(axes.flat)[len(shown) :]:
            axis.axis("off")
        for axis, (title, names) in zip(axes.flat, shown.items(), strict=False):
            for name in names:
                points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
                axis.plot(*zip(*points, strict=True), marker=".", label=name.removeprefix(TIMING))
                if name == "rollout/reward_mean":
                    _plot_moving_mean(axis, points)
            axis.set_title(title)
            axis.set_xlabel("step")
            axis.legend(fontsize="small")
    return path


def _plot_moving_mean(axis: Any, points: Sequence[tuple[int, float]]) -> None:
    """The mean of ten steps at a time, with its standard error as a band."""
    windows = [points[at : at + _WINDOW] for at in range(len(points) - _WINDOW + 1)]
    if not windows:
        return
    steps = [statistics.fmean(step for step, _ in window) for window in windows]
    means = [statistics.fmean(value for _, value in window) for window in windows]
    errors = [statistics.stdev(value for _, value in window) / math.sqrt(_WINDOW) for window in windows]
    low, high = ([mean + sign * one for mean, one in zip(means, errors, strict=True)] for sign in (-1, 1))
    axis.plot(steps, means, color="black", label=f"mean of {_WINDOW} steps and its standard error")
    axis.fill_between(steps, low, high, color="black", alpha=0.2)


@dataclass
class LiveSamples:
    """Observations of one rollout, by engine rank; times in seconds since the epoch.

    Attributes:
        counts: (time, unfinished samples from then on), where their number changed.
        freed: (start, end) of intervals in which the rollout had no more samples for the engine.
    """

    counts: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    freed: dict[int, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, rank: int, time: float, count: int) -> bool:
        """Record the number of samples; returns whether it has changed."""
        known = self.counts.setdefault(rank, [])
        if known and known[-1][1] == count:
            return False
        known.append((time, count))
        return True

    def times(self) -> Iterator[float]:
        """All times, unordered."""
        yield from (time for points in self.counts.values() for time, _ in points)
        yield from (time for stretches in self.freed.values() for stretch in stretches for time in stretch)


def plot_live_samples(directory: Path, rollout: LiveSamples) -> Path:
    """Draw live_samples.png of a rollout; returns its path.

    Above, a step line for each engine; below, a strip for each, hatched while the engine was freed.
    """
    from matplotlib.ticker import MaxNLocator

    ranks = sorted(rollout.counts.keys() | rollout.freed.keys())
    begin, end = min(rollout.times()), max(rollout.times())
    strips = min(_STRIP_INCHES * (len(ranks) + 1), _MOST_INCHES)
    path, shape = directory / LIVE_FILE, {"figsize": (11, 4 + strips), "height_ratios": (4, strips)}
    with drawing(path, 2, 1, sharex=True, **shape) as (_, (lines, bars)):
        for place, rank in enumerate(ranks):
            points = rollout.counts.get(rank, [])
            if points:
                seconds = [time - begin for time, _ in points] + [end - begin]
                lines.step(
                    seconds, [count for _, count in points] + [points[-1][1]], where="post", color=f"C{place % 10}"
                )
            stretches = [(start - begin, stop - start) for start, stop in rollout.freed.get(rank, [])]
            bars.broken_barh(stretches, (place - 0.4, 0.8), facecolor="none", edgecolor=f"C{place % 10}", hatch="////")
        lines.set_ylabel("live samples")
        lines.set_ylim(bottom=0)
        lines.yaxis.set_major_locator(MaxNLocator(integer=True))
        bars.set_ylim(len(ranks) - 0.5, -0.5)
        bars.set_xlabel("seconds of the rollout; hatched: engine freed")
        _name_engines(bars, ranks)
    return path


def _name_engines(axis: Any, ranks: list[int]) -> None:
    """Each strip's engine in the colour of its line."""
    if len(ranks) > _NAMED:
        return
    axis.set_yticks(range(len(ranks)), [f"engine {rank}" for rank in ranks])
    for place, label in enumerate(axis.get_yticklabels()):
        label.set_color(f"C{place % 10}")
