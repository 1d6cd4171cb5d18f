"""How much engines decode while the actor updates: python -m benchmarks.overlap [--updates 8] [--out FILE.json].

One system of the tiny shape as a run has it, two ranks and two engines on this machine. Between two updates engines
keep the samples they have; each update is made twice, with engines at rest and with a session beside it. The share is
of an update's time in which an engine was decoding, the mean over engines.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlhfspec_mega.algorithms.choice import make_algorithm
from rlhfspec_mega.algorithms.policy_gradient import PolicyGradient
from rlhfspec_mega.config.compose import load_config
from rlhfspec_mega.config.model_shape import model_shape
from rlhfspec_mega.config.sizes import derive_sizes
from rlhfspec_mega.ledger.entry import Purpose
from rlhfspec_mega.ledger.ledger import Ledger
from rlhfspec_mega.models.hf_directory import write_directory
from rlhfspec_mega.models.initialize import initial_tensors
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.observe.timeline import Timeline
from rlhfspec_mega.system.setup import Setup
from rlhfspec_mega.system.system import System
from rlhfspec_mega.types import GenerationRequest, Prompt, Sample, Span

MEMBERS, GROUPS = 8, 16
SHORT, LONG = 64, 480  # tokens of samples to learn from, and of those that are decoded meanwhile
OPTIONS = ["speculation=off", "algorithm.kl_coef=0", f"rollout.max_new_tokens={LONG}", "trainer.eval_every=0"]


class Recorder(Timeline):
    """Keeps the decode spans of every engine."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.decoded: dict[int, list[Span]] = {}

    def engine(self, rank: int, spans: Sequence[Span]) -> None:
        super().engine(rank, spans)
        self.decoded.setdefault(rank, []).extend(span for span in spans if span.name == "decode")


def requests_of(ledger: Ledger, step: int, limit: int) -> tuple[list[GenerationRequest], list[Sample]]:
    """Groups that nothing but the limit ends."""
    samples = [
        Sample(f"{step}.{number}.{member}", step, Prompt(number, "", "", (1, 2 + number % 200)), member)
        for number, member in itertools.product(range(step * GROUPS, (step + 1) * GROUPS), range(MEMBERS))
    ]
    ledger.open(samples, Purpose.TRAIN)
    requests = [
        GenerationRequest(one.sample_id, f"{one.prompt.index}", one.prompt.tokens, number, limit)
        for number, one in enumerate(samples)
    ]
    return requests, samples


def update(system: System, algorithm: PolicyGradient, samples: list[Sample], seed: int) -> tuple[float, float]:
    """Log-probs, advantages and an optimizer step; when it began and ended."""
    begun = time.time()
    experience = algorithm.experience(samples)
    algorithm.add_rewards(samples, experience)
    algorithm.add_old_logprobs(experience, system.actor)
    generator = torch.Generator().manual_seed(seed)
    algorithm.add_advantages(experience, generator)
    algorithm.update(experience, system.learners, 0, generator)
    return begun, time.time()


def overlap(spans: Sequence[Span], begun: float, ended: float) -> float:
    """Seconds of these spans, which follow each other, within an interval."""
    parts = (min(span.start + span.seconds, ended) - max(span.start, begun) for span in spans)
    return sum(max(0.0, part) for part in parts)


def measure(updates: int, directory: Path) -> dict[str, Any]:
    """All figures of one system."""
    config = load_config([*OPTIONS, f"output_dir={directory}", "name=overlap"])
    shape = model_shape(config.model)
    model = directory / "model"
    tensors = mapping_for(shape.architecture).hf_tensors(shape)
    write_directory(model, shape, initial_tensors(tensors, shape.num_layers, seed=0))
    setup = Setup(config, derive_sizes(config, shape), shape, directory, 2 * updates, model)
    algorithm = make_algorithm(config.algorithm, MEMBERS, GROUPS * MEMBERS)
    recorder, ledger = Recorder(directory / "timeline.json"), Ledger()
    rows: list[dict[str, float]] = []
    with System(setup, recorder) as system:
        system.actor.load_weights(model)
        system.reshard(0)
        requests, samples = requests_of(ledger, 0, SHORT)
        results = system.rollout.generate(requests, ledger, "generate")
        for number, sample in enumerate(samples):
            found = results[sample.sample_id]
            sample.response_tokens, sample.engine_logprobs = found.tokens, found.logprobs
            sample.reward = float(number % 2)
        for number in range(updates):
            alone_begun, alone_ended = update(system, algorithm, samples, number)
            requests, _ = requests_of(ledger, number + 1, LONG)
            recorder.decoded.clear()
            session = system.rollout.begin(requests, ledger, "beside")
            with system.beside(session):
                begun, ended = update(system, algorithm, samples, number)
            left = len(session.unfinished())
            system.rollout.abort(session, "beside")
            decoded = [overlap(spans, begun, ended) / (ended - begun) for spans in recorder.decoded.values()]
            inside = [s for spans in recorder.decoded.values() for s in spans if begun < s.start + s.seconds < ended]
            rows.append(
                {
                    "share": statistics.mean(decoded)
                    if len(decoded) == len(setup.placement.devices("engine"))
                    else 0.0,
                    "tokens": sum(float(span.arguments["tokens"]) for span in inside),
                    "steps": sum(float(span.arguments["steps"]) for span in inside),
                    "unfinished": left,
                    "seconds_beside": ended - begun,
                    "seconds_alone": alone_ended - alone_begun,
                }
            )
    return {"updates": rows} | {
        name: {"median": statistics.median(row[name] for row in rows), "least": min(row[name] for row in rows)}
        for name in ("share", "tokens")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/overlap_cpu.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="benchmark.") as directory:
        found = measure(arguments.updates, Path(directory))
    print("update  share of its time in which engines decoded  tokens  steps  seconds beside / alone")
    for number, row in enumerate(found["updates"]):
        print(
            f"{number:6}  {row['share']:45.3f}  {row['tokens']:6.0f}  {row['steps']:5.0f}  "
            f"{row['seconds_beside']:.2f} / {row['seconds_alone']:.2f}"
        )
    print(f"share of an update's time: median {found['share']['median']:.3f}, least {found['share']['least']:.3f}")
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
