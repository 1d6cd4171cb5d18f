"""Records the results of each step: console, metrics.jsonl, rollouts.jsonl, and the summary at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.observe.console import Console
from rlhfspec_mega.observe.json_lines import keep_steps_before, read_lines
from rlhfspec_mega.observe.metrics import ROLLOUT, TIMING
from rlhfspec_mega.observe.plot import LiveSamples, plot_curves, plot_live_samples
from rlhfspec_mega.observe.rollouts import ROLLOUTS_FILE, write_rollouts
from rlhfspec_mega.observe.run_log import METRICS_FILE, RunLog
from rlhfspec_mega.observe.spans import PhaseTimer
from rlhfspec_mega.observe.summary import summarize, summary_in_words, write_summary
from rlhfspec_mega.observe.timeline import Timeline
from rlhfspec_mega.types import Sample


def sample_metrics(samples: Sequence[Sample], group: str) -> dict[str, float]:
    """Metrics of a set of samples; `group`: ROLLOUT or VAL. Means of rewards are over samples that have one."""
    lengths = [len(sample.response_tokens) for sample in samples]
    count = max(len(samples), 1)
    rewarded = [sample for sample in samples if not sample.failure]
    return {
        group + "reward_mean": sum(sample.reward for sample in rewarded) / max(len(rewarded), 1),
        group + "exact_mean": sum(sample.exact for sample in rewarded) / max(len(rewarded), 1),
        group + "response_length_mean": sum(lengths) / count,
        group + "response_length_max": float(max(lengths, default=0)),
        group + "truncation_rate": sum(sample.truncated for sample in samples) / count,
    }


class Reporter:
    """Use as a context manager around the steps.

    Args:
        first_step: a resumed run drops what was recorded of this step and later.
    """

    def __init__(
        self,
        directory: Path,
        config: RunConfig,
        console: Console,
        phases: PhaseTimer,
        timeline: Timeline,
        first_step: int = 0,
    ) -> None:
        self._directory, self._config, self._console, self._phases = directory, config, console, phases
        self._timeline, self._rollout = timeline, LiveSamples()  # of the last step
        self._log = RunLog(directory, config.logger, config.name, first_step)
        keep_steps_before(directory / ROLLOUTS_FILE, first_step)

    def rewind(self, step: int) -> None:
        """Drop what was recorded of `step` and later: these steps will be repeated."""
        self._log.rewind(step)
        keep_steps_before(self._directory / ROLLOUTS_FILE, step)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        self._timeline.flush()
        self._log.close()

    def step(self, step: int, samples: Sequence[Sample], metrics: Mapping[str, float]) -> dict[str, float]:
        """Record a finished step, counted from 0; returns the seconds of its phases."""
        seconds = self._phases.take_step()
        tokens = float(sum(len(sample.response_tokens) for sample in samples))
        row = sample_metrics(samples, ROLLOUT) | {
            "rollout/generated_tokens": tokens,
            "perf/generation_tokens_per_second": tokens / max(seconds.get("generate", 0.0), 1e-9),
            **metrics,
            **{TIMING + name: value for name, value in seconds.items()},
        }
        self._log.log(step, row)
        if row.get("actor/skipped_updates"):
            self._console.note(
                f"WARNING: step {step + 1} left out {row['actor/skipped_updates']:.0f} update(s): the gradient was not "
                "finite. If this goes on, lower actor.optimizer.lr and look at the loss."
            )
        self._rollout = self._timeline.take_live()
        self._timeline.flush()
        write_rollouts(self._directory / ROLLOUTS_FILE, samples, self._config.logger.rollouts_per_step)
        self._console.step(step + 1, row)
        return seconds

    def finish(self, step: int, metrics: Mapping[str, float], started: float, start_model: str) -> None:
        """Record the last evaluation, write summary and plot, and say how the run went.

        Args:
            started: time.monotonic() at the start of the run.
            start_model: the directory the run began with; a replay of its first step needs it.
        """
        seconds = self._phases.take_step()
        self._log.log(step, dict(metrics) | {TIMING + name: value for name, value in seconds.items()})
        self._log.close()
        rows = read_lines(self._directory / METRICS_FILE)
        summary = {"start_model": start_model} | summarize(rows, time.monotonic() - started)
        write_summary(self._directory, summary)
        plots = self._config.logger.plots
        if plots:
            plot_curves(self._directory, rows)
        if plots and self._rollout.counts:
            plot_live_samples(self._directory, self._rollout)
        self._console.note(summary_in_words(summary))
        drawn = "curves, " if plots else ""
        self._console.note(
            f"Everything is in {self._directory}: summary.json, {drawn}rollouts.jsonl, the model, "
            "and timeline.json, which ui.perfetto.dev shows."
        )
