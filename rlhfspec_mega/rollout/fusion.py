"""Scoring fused with generation: which finished samples wait for the reference, who scores them, what has come back.

Inter-stage fusion of RLHFuse (Zhong et al. 2024, arXiv 2409.13221): inference tasks are split by sample, so that
devices freed by the long tail work on samples that are done.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from rlhfspec_mega.algorithm.experience import Floats
from rlhfspec_mega.errors import RunError
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


class ScoringQueue:
    """Finished samples of one rollout on their way through the reference; the driver's side.

    A replica of the reference scores one batch at a time. Every sample added is in one place: waiting, with one
    replica, or in the results.

    Attributes:
        results: log-probs of the response tokens of scored samples, by id.
        scored_tokens, seconds: tokens of scored samples, and what replicas spent on them, all together.
    """

    def __init__(self) -> None:
        self.results: dict[str, Floats] = {}
        self.scored_tokens, self.seconds = 0, 0.0
        self._known: set[str] = set()
        self._waiting: deque[ScoringTask] = deque()
        self._given: dict[int, list[ScoringTask]] = {}  # by replica

    @property
    def done(self) -> bool:
        """Whether every sample added so far is scored."""
        return len(self.results) == len(self._known)

    @property
    def unscored_tokens(self) -> int:
        """Tokens of samples that no replica has answered for."""
        return sum(task.tokens for batch in (self._waiting, *self._given.values()) for task in batch)

    def add(self, request: GenerationRequest, result: GenerationResult) -> None:
        """A sample has finished. Raises RunError for one that was added before."""
        if result.sample_id in self._known:
            raise RunError(f"Sample {result.sample_id} was handed in for scoring twice.")
        self._known.add(result.sample_id)
        self._waiting.append(ScoringTask(result.sample_id, request.prompt_tokens, tuple(result.tokens)))

    def take(self, replica: int, max_tokens: int) -> list[ScoringTask]:
        """A batch for a free replica: those that have waited longest, of at most so many tokens; empty if none waits.

        A sample that is longer goes alone. Raises RunError for a replica that has not answered its last batch.
        """
        if replica in self._given:
            raise RunError(f"Replica {replica} was to score another batch before it returned the last one.")
        batch: list[ScoringTask] = []
        room = max_tokens
        while self._waiting and (not batch or self._waiting[0].tokens <= room):
            batch.append(self._waiting.popleft())
            room -= batch[-1].tokens
        if batch:
            self._given[replica] = batch
        return batch

    def report(self, report: ScoreReport) -> None:
        """File what a replica answered.

        Raises RunError unless it is one finite log-prob for each response token of exactly the batch it was given.
        """
        replica = report.replica
        batch = self._given.get(replica)
        if batch is None:
            raise RunError(f"Replica {replica} scored {len(report.logprobs)} samples and had been given none.")
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
        del self._given[replica]
        self.results |= report.logprobs
        self.scored_tokens += sum(task.tokens for task in batch)
        self.seconds += report.span.seconds

    def lose(self, replica: int) -> None:
        """A replica died: what it was scoring waits again, before all others."""
        self._waiting.extendleft(reversed(self._given.pop(replica, [])))
