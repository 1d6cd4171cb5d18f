"""A run's metrics: metrics.jsonl always, TensorBoard and Weights & Biases on request."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from rlhfspec_mega.config.schema.system import LoggerConfig
from rlhfspec_mega.observe.json_lines import keep_steps_before

METRICS_FILE, TENSORBOARD_DIR = "metrics.jsonl", "tensorboard"


class RunLog:
    """Writes the metrics of each step to all places. Files are created with the first metrics.

    A run that resumes at `first_step` drops what was logged for that step and later, since it repeats them.
    """

    def __init__(self, directory: Path, config: LoggerConfig, run_name: str, first_step: int = 0) -> None:
        self._directory = directory
        self._config = config
        self._run_name = run_name
        self._first_step = first_step
        self._file: TextIO | None = None
        self._tensorboard: Any = None
        self._wandb: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append {"step": step, "time": seconds since the epoch, **metrics} and flush; values that are no number
        (NaN, infinity) are written as null, which JSON can hold."""
        if self._file is None:
            self._file = self._open()
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        line = {"step": step, "time": time.time(), **dict.fromkeys(metrics), **finite}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            for name, value in finite.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(finite, step=step)

    def rewind(self, step: int) -> None:
        """Drop what was logged for `step` and later, as soon as something is logged again."""
        self.close()
        self._first_step = step

    def close(self) -> None:
        """Close every place; safe to call twice and when nothing was logged."""
        if self._file is not None:
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
        self._file = self._tensorboard = self._wandb = None

    def _open(self) -> TextIO:
        path = self._directory / METRICS_FILE
        keep_steps_before(path, self._first_step)
        if self._config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # purge_step hides points of steps that a resumed run does again.
            purge = self._first_step or None
            self._tensorboard = SummaryWriter(str(self._directory / TENSORBOARD_DIR), purge_step=purge)
        if self._config.wandb:
            import wandb

            # A resumed run is a run of its own there; the group shows both as one.
            name = self._run_name
            self._wandb = wandb.init(
                project=self._config.wandb_project, name=name, group=name, dir=str(self._directory)
            )
        return path.open("a", encoding="utf-8")
