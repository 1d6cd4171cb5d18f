"""rollouts.jsonl: every sample with all its fields, for people and for replays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.observe.json_lines import text_lines
from rlhfspec_mega.types import FinishReason, Prompt, Sample, SampleState

ROLLOUTS_FILE = "rollouts.jsonl"
# In each line, text for people comes first and numbers for replays follow.
FIRST = ("step", "sample_id", "reward", "exact", "failure", "advantage", "finish_reason", "response")


def write_rollouts(path: Path, samples: Sequence[Sample], limit: int = 0) -> None:
    """Append one line for each sample, or for the first `limit` of them (0: all; a replay needs all).

    Floats keep every bit, so that a replay sees the same numbers.
    """
    lines = [json.dumps(_to_json(sample), ensure_ascii=False) + "\n" for sample in samples[: limit or None]]
    # A lone surrogate, which UTF-8 cannot hold, becomes the escape that JSON has for it.
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(lines)


def read_rollouts(path: Path, step: int) -> list[Sample]:
    """The samples of one step, in the order in which they were written.

    Raises:
        UserError: there is no such file, a line (named) is no sample, or the step is not in it.
    """
    try:
        lines = text_lines(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): give the rollouts.jsonl of a run.") from None
    samples, steps = [], set()
    for number, line in enumerate(lines, start=1):
        sample = _parsed(path, number, line)
        steps.add(sample.step)
        if sample.step == step:
            samples.append(sample)
    if not samples:
        there = f"it holds steps {min(steps)} to {max(steps)}" if steps else "it is empty"
        raise UserError(f"{path} has no sample of step {step}: {there}.")
    return samples


def _to_json(sample: Sample) -> dict[str, Any]:
    values = asdict(sample)
    values["state"] = sample.state.value
    values["finish_reason"] = sample.finish_reason.value if sample.finish_reason else None
    prompt = values.pop("prompt")
    readable = {name: values.pop(name) for name in FIRST[:-1]}
    return {**readable, "prompt": prompt["text"], "answer": prompt["answer"], "response": values.pop("response")} | {
        "prompt_index": prompt["index"],
        "prompt_tokens": list(prompt["tokens"]),
        **values,
    }


def _parsed(path: Path, number: int, line: str) -> Sample:
    try:
        values = json.loads(line)
        prompt = Prompt(
            index=values.pop("prompt_index"),
            text=values.pop("prompt"),
            answer=values.pop("answer"),
            tokens=tuple(values.pop("prompt_tokens")),
        )
        reason = values.pop("finish_reason")
        sample = Sample(
            prompt=prompt,
            state=SampleState(values.pop("state")),
            finish_reason=FinishReason(reason) if reason else None,
            **values,
        )
        if set(values) != {field.name for field in fields(Sample)} - {"prompt", "state", "finish_reason"}:
            raise ValueError("fields are missing")
        _check_lengths(sample)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"field {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{path}, line {number} is not a sample ({what}): remove the line.") from None
    return sample


def _check_lengths(sample: Sample) -> None:
    """Raise ValueError unless every per-token list has one entry per response token, or is empty."""
    for name in ("engine_logprobs", "policy_versions", "old_logprobs", "reference_logprobs"):
        length = len(getattr(sample, name))
        if length not in (0, len(sample.response_tokens)):
            raise ValueError(f"{name} has {length} entries for {len(sample.response_tokens)} response tokens")
