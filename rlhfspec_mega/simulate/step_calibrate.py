"""Reads the costs of a step's phases out of the files of a run."""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlhfspec_mega.config.compose import saved_config
from rlhfspec_mega.config.logprob_pass import skips_logprob_pass
from rlhfspec_mega.config.output_dir import CONFIG_FILE
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.sizes import Sizes, shape_and_sizes
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
from rlhfspec_mega.planning.placement import ACTOR, CRITIC
from rlhfspec_mega.simulate.calibrate import Measurements, calibrate, decode_samples
from rlhfspec_mega.simulate.step import scoring_rest, simulated_rollouts
from rlhfspec_mega.simulate.step_costs import SHARED, MeasuredLengths, StepCosts, setting
from rlhfspec_mega.simulate.workload import Workload
from rlhfspec_mega.types import Span

LEAST_STEPS = 3  # after the first one, in which engines measure their own costs


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

    Raises UserError if the directory has no run, one without a timeline, one with too few steps, or damaged files.
    """
    config = _config(run / CONFIG_FILE)
    _, sizes = shape_and_sizes(config)
    steps = _steps(run)
    lanes = _lanes(run / TIMELINE_FILE)
    windows = _rollout_windows(lanes, steps)
    engines = [
        [span for span in spans if _during(span, windows)]
        for lane, spans in sorted(lanes.items())
        if lane[0] >= engine_lane(0, 0).process and lane[1] == 0
    ]
    scores = [span for spans in _of_process(lanes, reference_lane(0)) for span in spans]
    of_actor = _of_process(lanes, actor_lane(0))[:1]
    optimizer = sum(_median_seconds(of_actor, f"{model} optimizer step") for model in (ACTOR, CRITIC))

    def per_token(phase: str, less: float = 0.0, of: Sequence[_Step] | None = None) -> float:
        """Median over the steps, or some of them, for each token of a replica."""
        return statistics.median(
            max(step.seconds.get(phase, 0.0) - less, 0.0)
            / (step.mean_tokens * sizes.samples_per_step / sizes.data_parallel)
            for step in of or steps.values()
        )

    with_pass = _with_logprob_pass(list(steps.values()))
    update = per_token("update", less=optimizer * sizes.updates_per_step)
    costs = StepCosts(
        engine=calibrate(_measurements(run, config, engines, scores)),
        lengths=_lengths(steps.values(), config.rollout.max_new_tokens),
        rollout_start=_outside_engines(windows, engines),
        stretch=1.0,
        scoring_stretch=1.0,
        reward=statistics.median(step.seconds.get("score", 0.0) for step in steps.values()) / sizes.samples_per_step,
        reference=0.0 if scores else per_token("reference"),
        # Of a run without the pass: a forward pass, of which the backward one costs two.
        logprobs=update / 3 if skips_logprob_pass(config, sizes) else per_token("logprobs", of=with_pass),
        logprob_passes=1.0 if skips_logprob_pass(config, sizes) else len(with_pass) / len(steps),
        refreshes=_refreshes(config, list(steps.values())),
        values=per_token("values"),
        update=update,
        optimizer=optimizer,
        reshard=statistics.median(step.seconds.get("reshard", 0.0) for step in steps.values()),
        source={"kind": "measured", "run": str(run), "steps": len(steps)},
        settings={name: setting(config, name) for name in SHARED},
    )
    stretch, scoring_stretch = _stretches(config, sizes, costs, list(steps.values()), windows)
    return replace(costs, stretch=stretch, scoring_stretch=scoring_stretch)


def _with_logprob_pass(steps: Sequence[_Step]) -> list[_Step]:
    """The steps in which the actor's log-probabilities had a pass of their own; all if none had."""
    longest = max(step.seconds.get("logprobs", 0.0) for step in steps)
    return [step for step in steps if step.seconds.get("logprobs", 0.0) >= longest / 4]


def _refreshes(config: RunConfig, steps: Sequence[_Step]) -> float:
    """Share of the draft's due refreshes that took place."""
    speculation = config.speculation
    if not speculation.refresh_every:
        return 1.0
    took = statistics.fmean(step.seconds.get("draft", 0.0) for step in steps)
    return min(took * speculation.refresh_every / speculation.refresh_seconds, 1.0)


def _stretches(
    config: RunConfig, sizes: Sizes, costs: StepCosts, steps: Sequence[_Step], windows: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    """How much longer the run's rollouts took than the same ones simulated, and the scoring after them.

    1 if not all samples are known, or where nothing was simulated.
    """
    if len(windows) != len(steps) or any(len(step.samples) != sizes.samples_per_step for step in steps):
        return 1.0, 1.0
    workloads = [_workload_of(step, config.rollout.max_new_tokens) for step in steps]
    simulated = simulated_rollouts(config, sizes, costs, workloads, workloads[:1])
    stretch = statistics.median(
        max(end - start - costs.rollout_start, 0.0) / rollout.makespan
        for (start, end), rollout in zip(windows, simulated, strict=True)
    )
    rest, measured = scoring_rest(simulated), statistics.fmean(step.seconds.get("reference", 0.0) for step in steps)
    return stretch, measured / rest if rest > 0 else 1.0


def _workload_of(step: _Step, limit: int) -> Workload:
    samples = sorted(step.samples)
    numbers = {prompt: number for number, prompt in enumerate(sorted({prompt for prompt, _, _ in samples}))}
    groups, prompts, lengths = zip(*((numbers[prompt], tokens, new) for prompt, tokens, new in samples), strict=True)
    return Workload(np.array(groups, np.int64), np.array(prompts, np.int64), np.array(lengths, np.int64), limit)


def _measurements(
    run: Path, config: RunConfig, engines: Sequence[Sequence[Span]], scores: Sequence[Span]
) -> Measurements:
    prefills = [span for spans in engines for span in spans if span.name == "prefill"]
    try:
        samples = [sample for spans in engines for sample in decode_samples(spans)]
        prefill_tokens, scoring_tokens = (
            sum(int(span.arguments["tokens"]) for span in spans) for spans in (prefills, scores)
        )
    except (KeyError, TypeError, ValueError, ArithmeticError):
        raise UserError(f"{run / TIMELINE_FILE} is damaged: give another run.") from None
    if not samples:
        raise UserError(f"{run / TIMELINE_FILE} has no decode steps after the first step: give a longer run.")
    slots = config.rollout.max_running_requests
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    return Measurements(
        run=run.name,
        slots=slots,
        kv_tokens=slots * longest,
        plain=samples,  # as they came: with drafts, if the run drafted
        drafting=[] if config.speculation.policy == "off" else samples,
        prefill_tokens=prefill_tokens,
        prefill_seconds=sum(span.seconds for span in prefills),
        scoring_tokens=scoring_tokens,
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


def _median_seconds(lanes: Sequence[Sequence[Span]], name: str) -> float:
    """Of the spans of this name; 0 without any."""
    return statistics.median([span.seconds for spans in lanes for span in spans if span.name == name] or [0.0])


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


def _config(file: Path) -> RunConfig:
    try:
        return saved_config(file)
    except UnicodeDecodeError:
        raise UserError(f"{file} is damaged: give the directory of another run.") from None


def _steps(run: Path) -> dict[int, _Step]:
    """Steps by number, without the first. Raises UserError for rows that no run writes."""
    samples: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for number, row in enumerate(read_lines(run / ROLLOUTS_FILE), start=1):
        prompt, response = row.get("prompt_tokens"), row.get("response_tokens")
        if not isinstance(prompt, list) or not isinstance(response, list) or not _whole(row, "step", "prompt_index"):
            raise UserError(
                f"{run / ROLLOUTS_FILE}, line {number} is no sample (step, prompt_index, prompt_tokens, "
                "response_tokens): give another run."
            )
        samples[row["step"]].append((row["prompt_index"], len(prompt), len(response)))
    steps = {}
    for number, row in enumerate(read_lines(run / METRICS_FILE), start=1):
        seconds = {name.removeprefix(TIMING): value for name, value in row.items() if name.startswith(TIMING)}
        if not _whole(row, "step") or not all(map(_is_time, seconds.values())):
            raise UserError(
                f"{run / METRICS_FILE}, line {number} has no step, or a {TIMING}... that is no time: give another run."
            )
        if row["step"] in samples and row["step"] > min(samples):
            steps[row["step"]] = _Step(seconds, samples[row["step"]])
    if len(steps) < LEAST_STEPS:
        raise UserError(f"{run} has {len(steps)} steps after its first one: calibrate from {LEAST_STEPS} or more.")
    return steps


def _whole(row: Mapping[str, Any], *names: str) -> bool:
    """Whether the row has whole numbers under all these names."""
    return all(isinstance(row.get(name), int) for name in names)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= sys.float_info.max


def _lanes(file: Path) -> dict[tuple[int, int], list[Span]]:
    """Spans by process and thread number within it, in order of time."""
    lanes: dict[tuple[int, int], list[Span]] = defaultdict(list)
    try:
        for event in json.loads(file.read_text(encoding="utf-8")):
            if event["ph"] == "X":
                lane = lane_of(event["pid"], event["tid"])
                lanes[lane].append(Span(event["name"], event["ts"] / 1e6, event["dur"] / 1e6, event["args"]))
    except OSError:
        raise UserError(f"There is no {file}: the run wrote no timeline.") from None
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{file} is damaged: give another run.") from None
    return {lane: sorted(spans, key=lambda span: span.start) for lane, spans in lanes.items()}


def _of_process(lanes: Mapping[tuple[int, int], list[Span]], lane: Lane) -> list[list[Span]]:
    return [spans for (process, _), spans in sorted(lanes.items()) if process == lane.process]


def _rollout_windows(
    lanes: Mapping[tuple[int, int], list[Span]], steps: Mapping[int, _Step]
) -> list[tuple[float, float]]:
    """Start and end of the rollouts of these steps, which are the run's last ones."""
    phases = lanes.get((DRIVER.process, DRIVER.number), [])
    found = [span for span in phases if span.name == "generate"]
    return [(span.start, span.start + span.seconds) for span in found[-len(steps) :]]


def _during(span: Span, windows: Sequence[tuple[float, float]]) -> bool:
    return any(start <= span.start < end for start, end in windows)
