"""Finished samples scored by a frozen model on the engines' devices: beside generation, and the rest after it.

Inter-stage fusion of RLHFuse (Zhong et al. 2024, arXiv 2409.13221): inference tasks are split by sample, so that
devices freed by the long tail work on samples that are done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rlhfspec_mega.algorithm.experience import Floats
from rlhfspec_mega.errors import RunError
from rlhfspec_mega.ledger.ledger import Ledger
from rlhfspec_mega.types import GenerationRequest, GenerationResult, Span


@dataclass(frozen=True)
class ScoringTask:
    """A finished sample as the reference reads it."""

    sample_id: str
    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens to read, prompt included."""
        return len(self.prompt_tokens) + len(self.response_tokens)


@dataclass
class ScoreReport:
    """What a replica answers after scoring a batch.

    Attributes:
        replica: of the reference.
        logprobs: of the response tokens, by sample id.
        span: when the replica did it; its first batch includes reading the weights.
    """

    replica: int
    logprobs: dict[str, Floats]
    span: Span


class Replicas(Protocol):
    """A frozen model, replicated over the engines' devices; workers.scorer_group.ScorerGroup is one."""

    devices: int  # of one replica

    def serving(self) -> list[int]:
        """Replicas that may be given work."""

    def engines(self, replica: int) -> Collection[int]:
        """Ranks of the engines whose devices a replica lies on."""

    def start(self, replica: int, tasks: Sequence[ScoringTask]) -> list[Any]:
        """Begin to score a batch: a call on each rank of the replica."""

    def lost(self, calls: Sequence[Any]) -> bool:
        """Whether a rank that was given this batch has died since."""

    def report(self, replica: int, tasks: Sequence[ScoringTask], answers: Sequence[Any]) -> ScoreReport:
        """What the ranks' answers say of a batch."""

    def revive(self) -> None:
        """Wait until a replica serves. Raises RunError when none is left."""


@dataclass
class _Flight:
    """A batch on its way through a replica: a call on each rank, those that are open, and answers so far."""

    batch: list[ScoringTask]
    calls: list[Any]
    open: list[Any]
    answers: list[Any] = field(default_factory=list)


class Scoring:
    """The scoring of one rollout's samples, in batches, whoever dies; the ledger knows where each sample is.

    Args:
        max_tokens: of a batch, at most, prompts included; a longer sample is a batch of its own.

    Attributes:
        results: log-probs of the response tokens of scored samples, by id.
        seconds: that replicas have spent, all together.
    """

    def __init__(self, replicas: Replicas, max_tokens: int, ledger: Ledger) -> None:
        self._replicas, self._max_tokens, self._ledger = replicas, max_tokens, ledger
        self.results: dict[str, Floats] = {}
        self.seconds = 0.0
        self._added_tokens = self._scored_tokens = 0
        self._waiting: deque[ScoringTask] = deque()
        self._flights: dict[int, _Flight] = {}  # by replica, which scores one batch at a time

    @property
    def done(self) -> bool:
        """Whether every sample added so far is scored."""
        return not self._waiting and not self._flights

    @property
    def unscored_tokens(self) -> int:
        """Tokens of samples that no replica has answered for."""
        return self._added_tokens - self._scored_tokens

    @property
    def seconds_per_token(self) -> float:
        """Of one device; 0 before the first batch."""
        return self._replicas.devices * self.seconds / max(self._scored_tokens, 1)

    def add(self, request: GenerationRequest, result: GenerationResult) -> None:
        """A sample has finished. Raises RunError for one that has not, or that was added before."""
        self._ledger.ask_reference(result.sample_id)
        self._waiting.append(ScoringTask(result.sample_id, request.prompt_tokens, tuple(result.tokens)))
        self._added_tokens += self._waiting[-1].tokens

    def start(self, busy: Collection[int] = ()) -> None:
        """Give work to every idle replica none of whose engines is `busy` with samples."""
        for replica in self._replicas.serving():
            if replica in self._flights or not set(busy).isdisjoint(self._replicas.engines(replica)):
                continue
            if batch := self._take_batch():
                self._ledger.reference_reads([task.sample_id for task in batch], replica)
                calls = self._replicas.start(replica, batch)
                self._flights[replica] = _Flight(batch, calls, list(calls))

    def calls(self) -> list[Any]:
        """In flight."""
        return [call for flight in self._flights.values() for call in flight.open]

    def heard(self, call: Any) -> ScoreReport | None:
        """File an answer, or a replica's death; what the replica says of its batch once all its ranks have answered.

        Raises RunError where a rank failed, or scored something else than it was given.
        """
        found = next((item for item in self._flights.items() if call in item[1].open), None)
        if found is None:
            return None  # of a batch that a peer's death has ended
        replica, flight = found
        if self._replicas.lost(flight.calls):  # then the others may have failed for want of it
            self._lose(replica)
            return None
        flight.open.remove(call)
        flight.answers.append(call.result())
        if flight.open:
            return None
        report = self._replicas.report(replica, flight.batch, flight.answers)
        self._file(report)
        return report

    def go_on(self) -> None:
        """With all engines free, have something in flight. Raises RunError when no replica is left."""
        self.start()
        if not self._flights and not self.done:
            self._replicas.revive()

    def _take_batch(self) -> list[ScoringTask]:
        """Those that have waited longest, as many as a batch holds."""
        batch: list[ScoringTask] = []
        room = self._max_tokens
        while self._waiting and (not batch or self._waiting[0].tokens <= room):
            batch.append(self._waiting.popleft())
            room -= batch[-1].tokens
        return batch

    def _file(self, report: ScoreReport) -> None:
        """Raises RunError unless there is one finite log-prob for each response token of exactly the batch given."""
        replica, batch = report.replica, self._flights[report.replica].batch
        if report.logprobs.keys() != {task.sample_id for task in batch}:
            raise RunError(
                f"Replica {replica} scored {len(report.logprobs)} samples and was given {len(batch)}, or other ones."
            )
        for task in batch:
            found = report.logprobs[task.sample_id]
            if len(found) != len(task.response_tokens) or not np.isfinite(found).all():
                raise RunError(
                    f"Replica {replica} returned {len(found)} log-probs for the {len(task.response_tokens)} response "
                    f"tokens of sample {task.sample_id}, or some that are not finite."
                )
        self._ledger.reference_scored([task.sample_id for task in batch], replica)
        del self._flights[replica]
        self.results |= report.logprobs
        self._scored_tokens += sum(task.tokens for task in batch)
        self.seconds += report.span.seconds

    def _lose(self, replica: int) -> None:
        """A replica died: what it was scoring waits again, before all others."""
        batch = self._flights.pop(replica).batch
        self._ledger.reference_lost([task.sample_id for task in batch], replica)
        self._waiting.extendleft(reversed(batch))
