"""Two engines in processes of their own, and the ways to run a rollout on them that the rollout benchmark compares."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.samples import Target
from rlhfspec_mega.cluster.interface import WorkerSpec
from rlhfspec_mega.cluster.local import LocalCluster
from rlhfspec_mega.cluster.meeting_point import MeetingPoint
from rlhfspec_mega.config.schema.generation import ReallocationConfig, RolloutConfig
from rlhfspec_mega.config.schema.training import ActorConfig
from rlhfspec_mega.errors import RunError
from rlhfspec_mega.ledger.entry import Purpose
from rlhfspec_mega.ledger.ledger import Ledger
from rlhfspec_mega.megatron.description import ParallelSizes, describe
from rlhfspec_mega.megatron.rendezvous import Rendezvous
from rlhfspec_mega.models.hf_directory import HfWeights
from rlhfspec_mega.observe.timeline import Timeline
from rlhfspec_mega.planning.lengths import LengthPredictor
from rlhfspec_mega.planning.reallocation import Reallocator
from rlhfspec_mega.planning.rollout_state import MigrationCost
from rlhfspec_mega.planning.tail import Consolidator, TailPolicy
from rlhfspec_mega.rl.packing import Batching
from rlhfspec_mega.rollout.manager import RolloutManager
from rlhfspec_mega.rollout.reallocation import FIRST_DOWNTIME, Reallocation, ScoringWork
from rlhfspec_mega.rollout.scoring import Scoring
from rlhfspec_mega.types import GenerationRequest, MigrationEvent, Prompt, Sample, Span, TailTally, TensorInfo
from rlhfspec_mega.workers.scorer_group import ScorerGroup
from rlhfspec_mega.workers.torch_engine import TorchEngineWorker

ENGINES, SLOTS = 2, 8
POLL_SECONDS, SCORED_AT_ONCE = RolloutConfig().poll_interval, 512
SHIPPED = ReallocationConfig()  # the policy as a run has it
MECHANISMS = STATIC, QUEUE, MOVING, FUSED = "static", "queue", "reallocation", "reallocation + fusion"


class LoadedEngine(TorchEngineWorker):
    """An engine that reads its weights from a directory."""

    def load_weights(self, directory: Path) -> None:
        """Make a model directory's weights live as version 0."""
        weights = HfWeights(directory)
        infos = [TensorInfo(name, tuple(weights.get(name).shape), "float32") for name in weights.names()]
        self.engine.begin_update(0, infos)
        self.engine.update_weights([(name, 0, weights.get(name).flatten()) for name in weights.names()])
        self.end_update(0)


class Recorder(Timeline):
    """A timeline that also keeps what a simulator is calibrated with.

    Attributes:
        spans: by engine, in order of time.
        moves: samples that migrated.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.spans: dict[int, list[Span]] = {rank: [] for rank in range(ENGINES)}
        self.moves: list[MigrationEvent] = []

    def engine(self, rank: int, spans: Sequence[Span]) -> None:
        super().engine(rank, spans)
        self.spans[rank] += spans

    def migration(self, event: MigrationEvent) -> None:
        super().migration(event)
        self.moves.append(event)


@dataclass
class Outcome:
    """One rollout.

    Attributes:
        rollout, total: seconds of the rollout, and of it and the scoring of its samples.
        tail: what was done about its long tail.
        score_seconds: that replicas of the reference spent on scoring, together.
    """

    rollout: float
    total: float
    tail: TailTally
    score_seconds: float


class Fleet:
    """Engine processes with a model's weights; a context manager."""

    def __init__(self, target: Target, longest: int, prompt: int) -> None:
        self._target, self._longest, self._prompt = target, longest, prompt
        self._directory = tempfile.TemporaryDirectory(prefix="benchmark.")
        self._rollouts = 0

    def __enter__(self) -> Fleet:
        limits: dict[str, Any] = {"call_timeout": 300.0, "start_timeout": 120.0, "heartbeat_timeout": 120.0}
        self.cluster = LocalCluster(
            Path(self._directory.name) / "logs", threads=1, use_gpus=False, max_restarts=0, **limits
        )
        config = RolloutConfig(
            max_running_requests=SLOTS,
            max_prompt_tokens=self._prompt,
            max_new_tokens=self._longest,
            chunked_prefill_size=512,
        )
        arguments = {"shape": self._target.shape, "config": config, "dtype": "float32", "device": "cpu"}
        specs = [WorkerSpec("benchmarks.migration_cost.CopyingEngine", arguments, (rank,)) for rank in range(ENGINES)]
        self.engines = self.cluster.launch("engine", specs)
        self._scorers = self._launch_scorers()
        self.cluster.wait_started()
        self.engines.call("load_weights", self._target.directory, phase="load")
        self.cluster.publish(0)
        for rank in range(ENGINES):
            self.engines.confirm(rank, 0)
        return self

    def _launch_scorers(self) -> ScorerGroup:
        """The reference, a replica beside each engine."""
        config = ActorConfig(logprob_chunk=512)
        reference = describe(
            "reference",
            self._target.shape,
            config,
            ParallelSizes(),
            temperature=1.0,
            checkpoint=self._target.directory,
        )
        self._meeting_point = MeetingPoint(self.cluster.host_address, 300.0)
        specs = [
            WorkerSpec(
                "rlhfspec_mega.workers.megatron.MegatronWorker",
                {
                    "models": [reference],
                    "rendezvous": Rendezvous(f"{self._meeting_point.address}.{rank}", 0, 1, 300.0),
                    "device": "cpu",
                    "seed": 0,
                },
                (rank,),
            )
            for rank in range(ENGINES)
        ]
        workers = self.cluster.launch("reference", specs)
        own = {rank: {rank} for rank in range(ENGINES)}
        return ScorerGroup(self.cluster, workers, [reference], own, Batching(SCORED_AT_ONCE))

    def __exit__(self, *_: object) -> None:
        self.cluster.close()
        self._meeting_point.close()
        self._directory.cleanup()

    def recorder(self, name: str) -> Recorder:
        """A recorder whose file ends with the fleet."""
        return Recorder(Path(self._directory.name) / f"{name}.json")

    def run(
        self,
        mechanism: str,
        requests: Sequence[GenerationRequest],
        reallocation: Reallocation | None,
        recorder: Recorder,
    ) -> Outcome:
        """One rollout of these samples and the scoring of all of them.

        Args:
            reallocation: that of the mechanism; it learns from one rollout of a scenario to the next.
        """
        self._rollouts += 1
        fuses = mechanism == FUSED
        ledger = _ledger(requests, self._rollouts)
        scoring = Scoring(self._scorers, SCORED_AT_ONCE, ledger)
        manager = RolloutManager(
            self.engines,
            self.cluster.wait,
            revive=_no_revival,
            poll_seconds=POLL_SECONDS,
            slots=None if mechanism == STATIC else SLOTS,
            reallocation=reallocation,
            timeline=recorder,
        )
        started = time.perf_counter()
        results = manager.generate(requests, ledger, "generate", None, scoring if fuses else None)
        rolled = time.perf_counter()
        if not fuses:
            for request in requests:
                scoring.add(request, results[request.sample_id])
        manager.finish_scoring(scoring, "reference")
        ended = time.perf_counter()
        return Outcome(rolled - started, ended - started, manager.take_tail(), scoring.seconds)


def reallocation_of(mechanism: str, longest: int) -> Reallocation | None:
    """What moves samples, as a run has it for all of its rollouts; None where they stay.

    Args:
        longest: most tokens of a response.
    """
    if mechanism not in (MOVING, FUSED):
        return None
    cost, work = MigrationCost(FIRST_DOWNTIME, 0.0), ScoringWork()
    reallocator = Reallocator(cost, least_gain=SHIPPED.least_gain, cool_down=SHIPPED.cool_down)
    consolidator = Consolidator(cost, tolerance=SHIPPED.tolerance) if mechanism == FUSED else None
    policy = TailPolicy(reallocator, consolidator, work.seconds)
    return Reallocation(policy, LengthPredictor(longest), POLL_SECONDS, work, policy.learn_cost)


def _ledger(requests: Sequence[GenerationRequest], step: int) -> Ledger:
    ledger = Ledger()
    prompts = {group: Prompt(number, "", "", (1,)) for number, group in enumerate({r.group_id for r in requests})}
    samples = [Sample(request.sample_id, step, prompts[request.group_id], 0) for request in requests]
    ledger.open(samples, Purpose.EVALUATE)
    return ledger


def _no_revival() -> None:
    raise RunError("All engines of the benchmark have died; look into its logs.")


torch.set_num_threads(1)
