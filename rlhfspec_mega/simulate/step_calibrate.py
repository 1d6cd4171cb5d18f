"""Reads the costs of a step's phases out of the files of a run."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from rlhfspec_mega.config.output_dir import CONFIG_FILE
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.observe.json_lines import read_lines
from rlhfspec_mega.observe.metrics import TIMING
from rlhfspec_mega.observe.rollouts import ROLLOUTS_FILE
from rlhfspec_mega.observe.run_log import METRICS_FILE
from rlhfspec_mega.observe.timeline import (
    DRIVER,
    TIMELINE_FILE,
    Lane,
    actor_lane,
    engine_lane,
    lane_of,
    reference_lane,
)
from rlhfspec_mega.simulate.calibrate import Measurements, calibrate, decode_samples
from rlhfspec_mega.simulate.step_costs import MeasuredLengths, StepCosts
from rlhfspec_mega.types import Span

LEAST_STEPS = 3  # after the first one, in which engines measure their own costs
# A run whose step is to be predicted must have these in common with the measured one.
SHARED = (
    "model.name",
    "model.path",
    "cluster.device",
    "placement.mode",
    "placement.reference",
    "actor.dtype",
    "actor.tensor_parallel",
    "actor.pipeline_parallel",
    "actor.recompute",
    "trainer.max_tokens_per_microbatch",
    "rollout.engine",
    "rollout.dtype",
    "rollout.max_new_tokens",
    "rollout.sglang.tensor_parallel",
    "speculation.policy",
)


@dataclass(frozen=True)
class _Step:
    """A measured step.

    Attributes:
        seconds: by phase.
        samples: of each sample that was written (`logger.rollouts_per_step`) the prompt's number, and its tokens of
            prompt and response.
    """

    seconds: dict[str, float]
    samples: list[tuple[int, int, int]]

    @property
    def mean_tokens(self) -> float:
        """Of prompt and response."""
        return statistics.fmean(prompt + response for _, prompt, response in self.samples)


def measured_costs(run: Path) -> StepCosts:
    """Costs of the steps of a finished or stopped run, the first step left out.

    Raises UserError if the directory has no run, one without a timeline, or one with too few steps.
    """
    config = _config(run)
    steps = _steps(run)
    lanes = _lanes(run / TIMELINE_FILE)
    windows = _rollout_windows(lanes, steps)
    actor, trainer = config["actor"], config["trainer"]
    of_actor = _of_process(lanes, actor_lane(0))
    replicas = max(len(of_actor) // (actor["tensor_parallel"] * actor["pipeline_parallel"]), 1)
    engines = [
        [span for span in spans if _during(span, windows)]
        for lane, spans in sorted(lanes.items())
        if lane[0] >= engine_lane(0, 0).process and lane[1] == 0
    ]
    scores = [span for spans in _of_process(lanes, reference_lane(0)) for span in spans]
    taken = [span.seconds for spans in of_actor[:1] for span in spans if span.name == "actor optimizer step"]
    optimizer = statistics.median(taken or [0.0])
    samples = trainer["prompts_per_step"] * trainer["samples_per_prompt"]
    updates = samples // (trainer["mini_batch_size"] or samples)

    def per_token(phase: str, less: float = 0.0) -> float:
        return statistics.median(
            max(step.seconds.get(phase, 0.0) - less, 0.0) / (step.mean_tokens * samples) * replicas
            for step in steps.values()
        )

    return StepCosts(
        engine=calibrate(_measurements(run, config, engines, scores)),
        lengths=_lengths(steps.values(), config["rollout"]["max_new_tokens"]),
        rollout_start=_outside_engines(windows, engines),
        reward=statistics.median(step.seconds.get("score", 0.0) / samples for step in steps.values()),
        reference=0.0 if scores else per_token("reference"),
        logprobs=per_token("logprobs"),
        update=per_token("update", less=optimizer * updates),
        optimizer=optimizer,
        reshard=statistics.median(step.seconds.get("reshard", 0.0) for step in steps.values()),
        source={"kind": "measured", "run": str(run), "steps": len(steps)},
        settings={name: reduce(lambda section, key: section[key], name.split("."), config) for name in SHARED},
    )


def _measurements(run: Path, config: Any, engines: Sequence[Sequence[Span]], scores: Sequence[Span]) -> Measurements:
    samples = [sample for spans in engines for sample in decode_samples(spans)]
    if not samples:
        raise UserError(f"{run / TIMELINE_FILE} has no decode steps after the first step: give a longer run.")
    prefills = [span for spans in engines for span in spans if span.name == "prefill"]
    slots = config["rollout"]["max_running_requests"]
    longest = config["rollout"]["max_prompt_tokens"] + config["rollout"]["max_new_tokens"]
    return Measurements(
        run=run.name,
        slots=slots,
        kv_tokens=slots * longest,
        plain=samples,  # as they came: with drafts, if the run drafted
        drafting=[] if config["speculation"]["policy"] == "off" else samples,
        prefill_tokens=sum(int(span.arguments["tokens"]) for span in prefills),
        prefill_seconds=sum(span.seconds for span in prefills),
        scoring_tokens=sum(int(span.arguments["tokens"]) for span in scores),
        scoring_seconds=sum(span.seconds for span in scores),
        scoring_start=0.0,
        copied_tokens=0,
        copy_seconds=0.0,
        downtimes=[],
        source_rate_during_copy=1.0,
    )


def _lengths(steps: Iterable[_Step], limit: int) -> MeasuredLengths:
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    prompts = {}
    for number, step in enumerate(steps):
        for prompt, prompt_tokens, response_tokens in step.samples:
            groups[number, prompt].append(response_tokens)
            prompts[number, prompt] = prompt_tokens
    return MeasuredLengths([prompts[group] for group in groups], list(groups.values()), limit)


def _outside_engines(windows: Sequence[tuple[float, float]], engines: Sequence[Sequence[Span]]) -> float:
    """Median seconds of a rollout before the first work of an engine and after the last."""
    found = []
    for start, end in windows:
        inside = [span for spans in engines for span in spans if start <= span.start < end]
        if inside:
            busy = max(span.start + span.seconds for span in inside) - min(span.start for span in inside)
            found.append(max(end - start - busy, 0.0))
    return statistics.median(found or [0.0])


# The files


def _config(run: Path) -> Any:
    try:
        return yaml.safe_load((run / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{run} holds no run ({CONFIG_FILE}: {error}): give the directory of a run.") from None


def _steps(run: Path) -> dict[int, _Step]:
    """Steps by number, without the first."""
    samples: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for row in read_lines(run / ROLLOUTS_FILE):
        lengths = (len(row["prompt_tokens"]), len(row["response_tokens"]))
        samples[row["step"]].append((row["prompt_index"], *lengths))
    steps = {}
    for row in read_lines(run / METRICS_FILE):
        seconds = {name.removeprefix(TIMING): value for name, value in row.items() if name.startswith(TIMING)}
        if row["step"] in samples and row["step"] > min(samples):
            steps[row["step"]] = _Step(seconds, samples[row["step"]])
    if len(steps) < LEAST_STEPS:
        raise UserError(f"{run} has {len(steps)} steps after its first one: calibrate from {LEAST_STEPS} or more.")
    return steps


def _lanes(file: Path) -> dict[tuple[int, int], list[Span]]:
    """Spans by process and thread number within it, in order of time."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        raise UserError(f"There is no {file}: the run wrote no timeline.") from None
    try:
        events = json.loads(text)
    except ValueError:
        raise UserError(f"{file} is damaged: give another run.") from None
    lanes: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lane = lane_of(event["pid"], event["tid"])
            lanes[lane].append(Span(event["name"], event["ts"] / 1e6, event["dur"] / 1e6, event["args"]))
    return {lane: sorted(spans, key=lambda span: span.start) for lane, spans in lanes.items()}


def _of_process(lanes: Mapping[tuple[int, int], list[Span]], lane: Lane) -> list[list[Span]]:
    return [spans for (process, _), spans in sorted(lanes.items()) if process == lane.process]


def _rollout_windows(
    lanes: Mapping[tuple[int, int], list[Span]], steps: Mapping[int, _Step]
) -> list[tuple[float, float]]:
    """Start and end of the rollouts of these steps, which are the run's last ones.

    A rollout is a phase "generate" that is followed by "score"; another one only reads what engines have counted.
    """
    phases = lanes.get((DRIVER.process, DRIVER.number), [])
    found = [one for one, following in pairwise(phases) if (one.name, following.name) == ("generate", "score")]
    return [(span.start, span.start + span.seconds) for span in found[-len(steps) :]]


def _during(span: Span, windows: Sequence[tuple[float, float]]) -> bool:
    return any(start <= span.start < end for start, end in windows)
