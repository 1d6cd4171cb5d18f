"""The result of a run: summary.json, and the same in words, from the lines of metrics.jsonl."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhfspec_mega.observe.figures import drafting_figures, tail_figures, tail_in_words
from rlhfspec_mega.observe.gains import gains_in_words
from rlhfspec_mega.observe.metrics import TIMING

SUMMARY_FILE = "summary.json"
ENDS = 10  # steps averaged at either end of a run, or half of them

Rows = Sequence[Mapping[str, Any]]


def summarize(rows: Rows, wall_seconds: float) -> dict[str, Any]:
    """The figures of a run; a figure that was not measured is None.

    Args:
        rows: one mapping per logged step, in order, by the names of observe.metrics. A row without a reward (an
            evaluation before the first step) does not count as a step.
        wall_seconds: of the whole run, as measured by the caller.

    Returns:
        steps; reward_first and reward_last, exact_first and exact_last (means over the first and last ten steps, or
        over each half of fewer); reward_rise_error (standard error of the difference of the rewards);
        eval_exact_first and eval_exact_last (first and last evaluation); generation_tokens_per_second (all tokens over
        all seconds of phase generate); logprob_difference_mean and response_length_mean (means over steps);
        phase_seconds (totals); wall_seconds; those of `tail_figures`; with a critic explained_variance_last and
        value_loss_last (means over the last steps); with drafts those of `drafting_figures` and the last
        calibration_error.
    """
    steps = [row for row in rows if row.get("rollout/reward_mean") is not None]
    phases = _phase_seconds(rows)
    evaluations = _values(rows, "val/exact_mean")
    tokens, generating = sum(_values(steps, "rollout/generated_tokens")), phases.get("generate", 0.0)
    ends = _ends(len(steps))
    rewards = _values(steps, "rollout/reward_mean")
    figures = {
        "steps": len(steps),
        "reward_first": _mean(rewards[:ends]),
        "reward_last": _mean(rewards[-ends:]),
        "reward_rise_error": _error_of_difference(rewards[:ends], rewards[-ends:]),
        "exact_first": _mean(_values(steps[:ends], "rollout/exact_mean")),
        "exact_last": _mean(_values(steps[-ends:], "rollout/exact_mean")),
        "eval_exact_first": evaluations[0] if evaluations else None,
        "eval_exact_last": evaluations[-1] if evaluations else None,
        "generation_tokens_per_second": tokens / generating if generating > 0 else None,
        "logprob_difference_mean": _mean(_values(steps, "rollout/logprob_diff_mean")),
        "response_length_mean": _mean(_values(steps, "rollout/response_length_mean")),
        "phase_seconds": phases,
        "wall_seconds": wall_seconds,
    }
    critic = {
        name: _mean(values[-ends:])
        for name, metric in (
            ("explained_variance_last", "critic/explained_variance"),
            ("value_loss_last", "critic/loss"),
        )
        if (values := _values(steps, metric))
    }
    drafting = drafting_figures(rows)
    if drafting:
        errors = _values(steps, "speculation/calibration_error")
        drafting["calibration_error"] = errors[-1] if errors else None
    return figures | critic | drafting | tail_figures(steps)


def supervised_summary(rows: Rows, wall_seconds: float) -> dict[str, Any]:
    """The figures of a supervised task, from the lines of metrics.jsonl; a figure that was not measured is None.

    Returns:
        steps; loss_first and loss_last (means as in `summarize`); val_loss_first and _last, and for
        reward models val_accuracy_first and _last; phase_seconds (totals); wall_seconds.
    """
    losses = [*_values(rows, "sft/loss"), *_values(rows, "reward_model/loss")]
    ends = _ends(len(losses))
    figures: dict[str, Any] = {
        "steps": len(losses),
        "loss_first": _mean(losses[:ends]),
        "loss_last": _mean(losses[-ends:]),
    }
    for name in ("loss", "accuracy"):
        if found := _values(rows, f"val/{name}"):
            figures |= {f"val_{name}_first": found[0], f"val_{name}_last": found[-1]}
    return figures | {"phase_seconds": _phase_seconds(rows), "wall_seconds": wall_seconds}


def supervised_in_words(summary: Mapping[str, Any]) -> str:
    """A few sentences for the end of a supervised task."""
    steps = summary["steps"]
    words = f"{steps} step{'' if steps == 1 else 's'} in {_duration(summary['wall_seconds'])}."
    if summary["loss_first"] is not None:
        words += f" Loss {_course(summary['loss_first'], summary['loss_last'])}."
    if "val_loss_first" in summary:
        words += f" Loss on held-out examples {_course(summary['val_loss_first'], summary['val_loss_last'])}."
    if "val_accuracy_first" in summary:
        words += f" Accuracy on held-out pairs {_course(summary['val_accuracy_first'], summary['val_accuracy_last'])}."
    return words


def _phase_seconds(rows: Rows) -> dict[str, float]:
    """Totals by phase."""
    phases: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith(TIMING) and value is not None:
                phase = name.removeprefix(TIMING)
                phases[phase] = phases.get(phase, 0.0) + value
    return phases


def write_summary(directory: Path, summary: Mapping[str, Any]) -> Path:
    """Write summary.json; returns its path."""
    path = directory / SUMMARY_FILE
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return path


def summary_in_words(summary: Mapping[str, Any]) -> str:
    """A few sentences for the end of a run; figures that were not measured are left out."""
    steps = summary["steps"]
    sentences = [f"{steps} step{'' if steps == 1 else 's'} in {_duration(summary['wall_seconds'])}."]
    if summary["reward_first"] is not None:
        first, last, error = (summary[f"reward_{name}"] for name in ("first", "last", "rise_error"))
        words = "" if error is None else f", by {last - first:+.3f} with a standard error of {error:.3f}"
        ends = _ends(steps)
        sentences.append(f"Mean reward {_course(first, last)}{words} (first and last {ends} step{'s'[: ends > 1]}).")
    if summary["eval_exact_first"] is not None:
        first, last = summary["eval_exact_first"], summary["eval_exact_last"]
        sentences.append(f"Exact answers to held-out prompts {_course(first, last)}.")
    if summary.get("explained_variance_last") is not None:
        share = summary["explained_variance_last"]
        sentences.append(f"The critic explained {share:.0%} of the variance of returns in the last steps.")
    if summary["generation_tokens_per_second"] is not None:
        sentences.append(f"Generation ran at {summary['generation_tokens_per_second']:,.0f} tokens per second.")
    if "tokens_per_step" in summary:
        sentences.append(_drafting_in_words(summary))
    if "gains" in summary and (words := gains_in_words(summary)):
        sentences.append(words)
    if "migrations" in summary:
        sentences.append(tail_in_words(summary))
    if summary["logprob_difference_mean"] is not None:
        difference = summary["logprob_difference_mean"]
        sentences.append(f"Engine and actor log-probabilities differ by {difference:.1e} on average.")
    if summary["phase_seconds"]:
        total = sum(summary["phase_seconds"].values()) or 1.0
        shares = sorted(summary["phase_seconds"].items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in shares[:5])
        sentences.append(f"Time went to {parts}.")
    return " ".join(sentences)


def _drafting_in_words(summary: Mapping[str, Any]) -> str:
    words = f"A decode step gave {summary['tokens_per_step']:.2f} tokens per sample"
    if "accepted_length" in summary:
        words += f" ({summary['accepted_length']:.2f} draft tokens accepted where any were verified"
        if "verified_per_accepted" in summary:
            words += f", {summary['verified_per_accepted']:.1f} verified for each"
        if summary.get("share_recalled"):
            words += f", {summary['share_recalled']:.0%} of them from history"
        words += ")"
    if "speedup_vs_plain" in summary:
        words += f", {summary['speedup_vs_plain']:.2f} times the pace of plain steps in between"
        if "speedup_error" in summary:
            words += f" (standard error {summary['speedup_error']:.2f})"
    if summary.get("calibration_error") is not None:
        words += f"; predicted acceptance was off by {summary['calibration_error']:.3f} on average"
    return words + "."


def _values(rows: Rows, name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _ends(steps: int) -> int:
    """Steps that are averaged at either end."""
    return max(1, min(ENDS, steps // 2))


def _error_of_difference(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Standard error of the difference of two means of independent values, which steps are nearly; None for fewer than
    two of either. Where they rise within the ten steps it comes out too large."""
    if min(len(one), len(other)) < 2:
        return None
    return math.sqrt(statistics.variance(one) / len(one) + statistics.variance(other) / len(other))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _course(first: float, last: float) -> str:
    verb = "rose" if last > first else "fell" if last < first else "stayed"
    return f"{verb} from {first:.3f} to {last:.3f}" if last != first else f"stayed at {first:.3f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
