"""What a user sees during a run: a live panel on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from rlhfspec_mega.observe.figures import shares_in_words
from rlhfspec_mega.observe.metrics import METRICS, TIMING

SHOWN = [metric for metric in METRICS if metric.label]
PLAIN_SECONDS = 10.0  # between lines of a long job where there is no live panel


class Console:
    """Use as a context manager around the run, so that the terminal is restored in any case.

    Args:
        enabled: False prints nothing: the run's files are the record (logger=quiet).
        stream: where to write; standard output by default. Plain lines unless it is a terminal.
    """

    def __init__(self, total_steps: int, enabled: bool = True, stream: TextIO | None = None) -> None:
        stream = stream or sys.stdout
        self._total = total_steps
        self._enabled = enabled
        self._rich = RichConsole(file=stream, highlight=False, soft_wrap=not stream.isatty())
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._task = self._progress.add_task("starting", total=total_steps)
        self._metrics: dict[str, float] = {}
        self._phase = ""
        live = enabled and stream.isatty()
        self._live = Live(self._panel(), console=self._rich, refresh_per_second=4) if live else None

    def __enter__(self) -> Console:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def table(self, title: str, rows: Sequence[Sequence[str]]) -> None:
        """Print a small table without a header, e.g. the derived sizes at the start."""
        table = Table(title=title, show_header=False, title_justify="left")
        for row in rows:
            table.add_row(*row)
        if self._enabled:
            self._rich.print(table)

    def note(self, text: str) -> None:
        """Print a line above the live panel."""
        if self._enabled:
            self._rich.print(text, markup=False)

    def phase(self, name: str) -> None:
        """Show which phase has begun; usable as PhaseTimer's `entered`."""
        self._phase = name
        self._progress.update(self._task, description=name)

    def progress(self, done: int, total: int) -> None:
        """Show the progress of the current phase, e.g. samples finished."""
        if self._live:
            self._progress.update(self._task, description=f"{self._phase} {done}/{total}")

    @contextmanager
    def bar(self, name: str, total: int) -> Iterator[Callable[[int, str], None]]:
        """A second progress bar for long work before the steps; call what it yields with (steps done, text)."""
        task = self._progress.add_task(name, total=total)
        done, said = 0, 0.0

        def advance(steps: int, text: str) -> None:
            nonlocal done, said
            done += steps
            self._progress.update(task, advance=steps, description=f"{name}: {text}")
            if not self._live and time.monotonic() - said > PLAIN_SECONDS:
                said = time.monotonic()
                self.note(f"{name} {done}/{total}  {text}")

        try:
            yield advance
        finally:
            self._progress.remove_task(task)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step, counted from 1. The panel keeps the last value of metrics that this step lacks."""
        self._metrics.update(metrics)
        self._progress.update(self._task, completed=step)
        if self._live:
            self._live.update(self._panel())
        elif self._enabled:
            self.note(f"step {step}/{self._total}  {self._line(metrics)}")

    def _line(self, metrics: Mapping[str, float]) -> str:
        parts = [
            f"{one.label} {one.form.format(metrics[one.name])}" for one in SHOWN if one.brief and one.name in metrics
        ]
        return "  ".join(parts + _phase_parts(metrics))

    def _panel(self) -> Group:
        table = Table.grid(padding=(0, 2))
        cells = [
            f"{one.label} [bold]{one.form.format(self._metrics[one.name])}[/bold]"
            for one in SHOWN
            if one.name in self._metrics
        ]
        for first in range(0, len(cells), 4):
            table.add_row(*cells[first : first + 4])
        lines = (shares_in_words(self._metrics), "  ".join(_phase_parts(self._metrics)))
        return Group(table, *filter(None, lines), self._progress)


def _phase_parts(metrics: Mapping[str, float]) -> list[str]:
    return [f"{name.removeprefix(TIMING)} {value:.1f}s" for name, value in metrics.items() if name.startswith(TIMING)]
