"""Engines decode while the actor learns: a whole system, driven by hand, as no default run does yet."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlhfspec_mega.algorithms.choice import make_algorithm
from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.config.sizes import derive_sizes
from rlhfspec_mega.ledger.entry import Purpose
from rlhfspec_mega.ledger.ledger import Ledger
from rlhfspec_mega.models.hf_config import read_shape
from rlhfspec_mega.observe.timeline import Timeline
from rlhfspec_mega.rl.experience import Experience
from rlhfspec_mega.system.setup import Setup
from rlhfspec_mega.system.system import System
from rlhfspec_mega.trainer import step_generator
from rlhfspec_mega.types import GenerationRequest, GenerationResult, Prompt, Sample, SampleState, Span
from tests.e2e.conftest import SHAPE, make_model, small_run

# So long that samples outlive some updates.
GROUPS, MEMBERS, LONG = 4, 2, 1800
# Updates go on until each engine has made so many steps inside: where cores are few, it may get little time meanwhile.
STEPS_INSIDE, MOST_UPDATES = 6, 30


class Recorder(Timeline):
    """Keeps what engines did."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.spans: list[tuple[int, Span]] = []

    def engine(self, rank: int, spans: Sequence[Span]) -> None:
        super().engine(rank, spans)
        self.spans += [(rank, span) for span in spans]


def steps_inside(spans: Sequence[tuple[int, Span]], updates: Sequence[tuple[float, float]]) -> list[int]:
    """Decode steps of each engine, of spans wholly inside an update (begun, ended), in seconds since the epoch."""
    steps = [0, 0]
    for rank, span in spans:
        ended = span.start + span.seconds
        if span.name == "decode" and any(first < span.start and ended < last for first, last in updates):
            steps[rank] += int(span.arguments["steps"])
    return steps


def opened(ledger: Ledger, step: int, limit: int) -> tuple[list[GenerationRequest], list[Sample]]:
    """Groups of one step, which nothing but the limit ends."""
    numbers = [step * GROUPS + group for group in range(GROUPS)]
    samples = [
        Sample(f"{step}.{number}.{member}", step, Prompt(number, "", "", (1, 2 + number)), member)
        for number, member in itertools.product(numbers, range(MEMBERS))
    ]
    ledger.open(samples, Purpose.TRAIN)
    requests = [
        GenerationRequest(one.sample_id, f"{one.prompt.index}", one.prompt.tokens, 7 * number, limit)
        for number, one in enumerate(samples)
    ]
    return requests, samples


def learnt_from(samples: Sequence[Sample], results: dict[str, GenerationResult]) -> list[Sample]:
    return [
        replace(
            one,
            response_tokens=results[one.sample_id].tokens,
            engine_logprobs=results[one.sample_id].logprobs,
            reward=float(number % 2),
        )
        for number, one in enumerate(samples)
    ]


def test_engines_decode_inside_an_update_and_every_sample_is_accounted_for(tmp_path: Path) -> None:
    """The second step's samples begin before the first step's update and outlive it and its weights."""
    model = make_model(tmp_path / "model", replace(SHAPE, max_positions=2048))
    limits = (
        f"rollout.max_new_tokens={LONG}",
        "trainer.max_tokens_per_microbatch=2048",
        "algorithm.kl_coef=0",
        "speculation=off",
        "rollout.poll_interval=0.05",  # a report's steps are one span: short ones fit into an update
    )
    config = load_config(small_run(model, tmp_path, "session", *limits))
    shape, ledger, recorder = read_shape(model), Ledger(), Recorder(tmp_path / "timeline.json")
    setup = Setup(config, derive_sizes(config, shape), shape, tmp_path, 10, model)
    algorithm = make_algorithm(config.algorithm, MEMBERS, GROUPS * MEMBERS)
    with System(setup, recorder) as system:
        system.actor.load_weights(model)
        system.reshard(0)
        requests, samples = opened(ledger, 0, 8)
        results = system.rollout.generate(requests, ledger, "first")
        samples = learnt_from(samples, results)
        experience: Experience = algorithm.experience(samples)
        algorithm.add_rewards(samples, experience)

        requests, _ = opened(ledger, 1, LONG)
        session = system.rollout.begin(requests[:MEMBERS], ledger, "second")
        with system.beside(session):
            session.start(requests[MEMBERS:])
            updates: list[tuple[float, float]] = []
            while len(updates) < MOST_UPDATES and min(steps_inside(recorder.spans, updates)) < STEPS_INSIDE:
                algorithm.add_old_logprobs(experience, system.actor)
                generator = step_generator(config, 0)
                algorithm.add_advantages(experience, generator)
                begun = time.time()
                algorithm.update(experience, system.learners, 0, generator)
                updates.append((begun, time.time()))
        steps = steps_inside(recorder.spans, updates)
        assert min(steps) >= STEPS_INSIDE, f"steps of each engine inside {len(updates)} updates: {steps}"
        assert session.unfinished(), "some samples outlive the update"

        system.rollout.pause_and_wait(session, "reshard")
        system.reshard(1)
        session.pause(False)
        results = system.rollout.drain(session, "second")
    assert results.keys() == {one.sample_id for one in requests}
    assert {ledger.state(one.sample_id) for one in requests} == {SampleState.FINISHED}
    assert all(len(result.tokens) == LONG for result in results.values())
    versions = [result.versions for result in results.values()]
    assert all(row == sorted(row) for row in versions) and {0, 1} <= {version for row in versions for version in row}
