"""Scoring of finished samples by frozen models on the engines' devices, during generation and after it.

Inter-stage fusion of RLHFuse (Zhong et al. 2024, arXiv 2409.13221): inference tasks are split by sample, so that
devices freed by the long tail of generation score samples that are finished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.ledger.ledger import Ledger
from rlhfspec_mega.planning.placement import REFERENCE, REWARD
from rlhfspec_mega.rl.experience import Floats
from rlhfspec_mega.types import GenerationRequest, GenerationResult, Span

Encode = Callable[[tuple[int, ...], tuple[int, ...]], tuple[int, ...]]


@dataclass(frozen=True)
class ScoringTask:
    """A finished sample to be scored.

    Attributes:
        reward_tokens: the sample as the reward model reads it; () without one.
    """

    sample_id: str
    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]
    reward_tokens: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens to process, prompt included."""
        return len(self.prompt_tokens) + len(self.response_tokens)


@dataclass
class ScoreReport:
    """The answer of a replica to a batch.

    Attributes:
        replica: number of the replica.
        logprobs: the reference's log-probs of the response tokens, by sample id; {} if it was not asked.
        rewards: the reward model's scores, by sample id; {} if it was not asked.
        span: the time that the batch took; for a replica's first batch it includes loading the weights.
    """

    replica: int
    logprobs: dict[str, Floats]
    span: Span
    rewards: dict[str, float] = field(default_factory=dict)


class Replicas(Protocol):
    """Frozen models, replicated over the engines' devices; workers.scorer_group.ScorerGroup is one."""

    devices: int  # number of devices of one replica

    def serving(self) -> list[int]:
        """Numbers of the replicas that take work."""

    def engines(self, replica: int) -> Collection[int]:
        """Ranks of the engines whose devices a replica lies on."""

    def start(self, replica: int, tasks: Sequence[ScoringTask], models: Sequence[str]) -> list[Any]:
        """Start scoring a batch by these models; returns one call for each rank of the replica."""

    def lost(self, calls: Sequence[Any]) -> bool:
        """Whether a rank that got one of these calls has died since."""

    def report(
        self, replica: int, tasks: Sequence[ScoringTask], models: Sequence[str], answers: Sequence[Any]
    ) -> ScoreReport:
        """Combine the ranks' answers to a batch."""

    def revive(self) -> None:
        """Wait until a replica serves. Raises RunError when none is left."""


@dataclass
class _BatchInFlight:
    """A batch at a replica: its calls, one for each rank, the calls not answered yet, and the answers so far."""

    batch: list[ScoringTask]
    calls: list[Any]
    open: list[Any]
    answers: list[Any] = field(default_factory=list)


class Scoring:
    """Scores one rollout's samples in batches and repeats the batches of replicas that die.

    Args:
        max_tokens: most tokens of a batch, prompts included; a longer sample is a batch of its own.
        ledger: records the state of each sample.
        models: names of the models that score.
        encode: from prompt and response tokens to those that the reward model reads; None: there is no reward model.

    Attributes:
        results: the reference's log-probs of the response tokens of scored samples, by sample id.
        rewards: the reward model's scores, by sample id.
        seconds: time that all replicas together have spent on scoring.
    """

    def __init__(
        self,
        replicas: Replicas,
        max_tokens: int,
        ledger: Ledger,
        models: Sequence[str] = (REFERENCE,),
        encode: Encode | None = None,
    ) -> None:
        self._replicas, self._max_tokens, self._ledger = replicas, max_tokens, ledger
        self.models, self._encode = tuple(models), encode
        self.results: dict[str, Floats] = {}
        self.rewards: dict[str, float] = {}
        self.seconds = 0.0
        self._added_tokens = self._scored_tokens = 0
        self._waiting: deque[ScoringTask] = deque()
        self._in_flight: dict[int, _BatchInFlight] = {}  # by replica, which scores one batch at a time

    @property
    def done(self) -> bool:
        """Whether every sample added so far is scored."""
        return not self._waiting and not self._in_flight

    @property
    def unscored_tokens(self) -> int:
        """Tokens, prompts included, of added samples that are not scored yet."""
        return self._added_tokens - self._scored_tokens

    @property
    def seconds_per_token(self) -> float:
        """Time of one device per token; 0 before the first batch."""
        return self._replicas.devices * self.seconds / max(self._scored_tokens, 1)

    def add(self, request: GenerationRequest, result: GenerationResult) -> None:
        """Add a finished sample. Raises RunError for one that is not finished or was added before."""
        self._ledger.ask_reference(result.sample_id)
        prompt, response = request.prompt_tokens, tuple(result.tokens)
        for_reward = self._encode(prompt, response) if self._encode else ()
        self._waiting.append(ScoringTask(result.sample_id, prompt, response, for_reward))
        self._added_tokens += self._waiting[-1].tokens

    def start(self, busy: Collection[int] = ()) -> None:
        """Start a batch on every idle replica of which no engine is `busy` with samples."""
        for replica in self._replicas.serving():
            if replica in self._in_flight or not set(busy).isdisjoint(self._replicas.engines(replica)):
                continue
            if batch := self._take_batch():
                self._ledger.reference_reads([task.sample_id for task in batch], replica)
                calls = self._replicas.start(replica, batch, self.models)
                self._in_flight[replica] = _BatchInFlight(batch, calls, list(calls))

    def calls(self) -> list[Any]:
        """The calls in flight."""
        return [call for flight in self._in_flight.values() for call in flight.open]

    def handle_answer(self, call: Any) -> ScoreReport | None:
        """Process the answer of a rank, or its death.

        Returns:
            the report of the replica if all its ranks have answered, else None.

        Raises:
            RunError: a rank failed, or scored other samples than it was given.
        """
        found = next((item for item in self._in_flight.items() if call in item[1].open), None)
        if found is None:
            return None  # its batch has ended because another rank of the replica died
        replica, flight = found
        if self._replicas.lost(flight.calls):  # before the result is read: the death of a rank makes the others fail
            self._lose(replica)
            return None
        flight.open.remove(call)
        flight.answers.append(call.result())
        if flight.open:
            return None
        report = self._replicas.report(replica, flight.batch, self.models, flight.answers)
        self._file(report)
        return report

    def start_or_revive(self) -> None:
        """Start batches while no engine decodes; wait for a replica if none serves.

        Raises RunError when no replica is left.
        """
        self.start()
        if not self._in_flight and not self.done:
            self._replicas.revive()

    def _take_batch(self) -> list[ScoringTask]:
        """Remove the next batch from the queue, in the order in which samples were added."""
        batch: list[ScoringTask] = []
        room = self._max_tokens
        while self._waiting and (not batch or self._waiting[0].tokens <= room):
            batch.append(self._waiting.popleft())
            room -= batch[-1].tokens
        return batch

    def _file(self, report: ScoreReport) -> None:
        """Store a replica's scores.

        Raises RunError unless each response token of its batch has one finite log-prob, and each sample one finite
        score.
        """
        replica, batch = report.replica, self._in_flight[report.replica].batch
        for model, answers in ((REFERENCE, report.logprobs), (REWARD, report.rewards)):
            if answers.keys() != ({task.sample_id for task in batch} if model in self.models else set()):
                raise RunError(
                    f"Replica {replica} of the {model} model returned scores of {len(answers)} samples, which are not "
                    f"the {len(batch)} samples of its batch."
                )
        for task in batch:
            found = report.logprobs.get(task.sample_id, np.zeros(len(task.response_tokens), np.float32))
            if len(found) != len(task.response_tokens) or not np.isfinite(found).all():
                raise RunError(
                    f"Replica {replica} of the reference model returned {len(found)} log-probs for the "
                    f"{len(task.response_tokens)} response tokens of sample {task.sample_id}, or some are not finite."
                )
            if not np.isfinite(report.rewards.get(task.sample_id, 0.0)):
                raise RunError(
                    f"Replica {replica} of the reward model returned {report.rewards[task.sample_id]} for sample "
                    f"{task.sample_id}, which is no finite number."
                )
        self._ledger.reference_scored([task.sample_id for task in batch], replica)
        del self._in_flight[replica]
        self.results |= report.logprobs
        self.rewards |= report.rewards
        self._scored_tokens += sum(task.tokens for task in batch)
        self.seconds += report.span.seconds

    def _lose(self, replica: int) -> None:
        """A replica died: put its batch back at the head of the queue."""
        batch = self._in_flight.pop(replica).batch
        self._ledger.reference_lost([task.sample_id for task in batch], replica)
        self._waiting.extendleft(reversed(batch))


class ScoringLeft:
    """Scoring of samples that are left when a rollout ends, as a cluster's background work (cluster.interface).

    Args:
        scored: called with the report of each batch.
    """

    def __init__(self, scoring: Scoring, scored: Callable[[ScoreReport], None]) -> None:
        self._scoring, self._scored = scoring, scored
        scoring.start()

    def calls(self) -> list[Any]:
        """The calls in flight."""
        return self._scoring.calls()

    def handle_answers(self, calls: Sequence[Any]) -> None:
        """Process answers of ranks and their deaths, and start the next batches."""
        for call in calls:
            if report := self._scoring.handle_answer(call):
                self._scored(report)
        self._scoring.start()
