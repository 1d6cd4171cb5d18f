"""Scoring fused with generation: which finished samples wait for the reference, who scores them, what has come back.

Inter-stage fusion of RLHFuse (Zhong et al. 2024, arXiv 2409.13221): inference tasks are split by sample, so that an
engine freed by the long tail works on samples that are done.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

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
    """What an engine answers after scoring a batch.

    Attributes:
        logprobs: of the response tokens, by sample id.
        span: when the engine did it; its first batch includes reading the weights.
    """

    logprobs: dict[str, list[float]]
    span: Span


class ScoringQueue:
    """Finished samples of one rollout on their way through the reference; the driver's side.

    An engine scores one batch at a time. Every sample added is in one place: waiting, with one engine, or in the
    results.

    Attributes:
        results: log-probs of the response tokens of scored samples, by id.
        scored_tokens, seconds: tokens of scored samples, and what engines spent on them, all together.
    """

    def __init__(self) -> None:
        self.results: dict[str, list[float]] = {}
        self.scored_tokens, self.seconds = 0, 0.0
        self._known: set[str] = set()
        self._waiting: deque[ScoringTask] = deque()
        self._given: dict[int, list[ScoringTask]] = {}  # by rank

    @property
    def done(self) -> bool:
        """Whether every sample added so far is scored."""
        return len(self.results) == len(self._known)

    @property
    def unscored_tokens(self) -> int:
        """Tokens of samples that no engine has answered for."""
        return sum(task.tokens for batch in (self._waiting, *self._given.values()) for task in batch)

    def holders(self) -> list[int]:
        """Ranks that have been given a batch and not answered."""
        return list(self._given)

    def add(self, request: GenerationRequest, result: GenerationResult) -> None:
        """A sample has finished. Raises RunError for one that was added before."""
        if result.sample_id in self._known:
            raise RunError(f"Sample {result.sample_id} was handed in for scoring twice.")
        self._known.add(result.sample_id)
        self._waiting.append(ScoringTask(result.sample_id, request.prompt_tokens, tuple(result.tokens)))

    def take(self, rank: int, max_tokens: int) -> list[ScoringTask]:
        """A batch for a free engine: those that have waited longest, of at most so many tokens; empty if none waits.

        A sample that is longer goes alone. Raises RunError for an engine that has not answered its last batch.
        """
        if rank in self._given:
            raise RunError(f"Engine {rank} was to score another batch before it returned the last one.")
        batch: list[ScoringTask] = []
        room = max_tokens
        while self._waiting and (not batch or self._waiting[0].tokens <= room):
            batch.append(self._waiting.popleft())
            room -= batch[-1].tokens
        if batch:
            self._given[rank] = batch
        return batch

    def report(self, rank: int, report: ScoreReport) -> None:
        """File what an engine answered.

        Raises RunError unless it is one finite log-prob for each response token of exactly the batch it was given.
        """
        batch = self._given.get(rank)
        if batch is None:
            raise RunError(f"Engine {rank} scored {len(report.logprobs)} samples and had been given none.")
        if report.logprobs.keys() != {task.sample_id for task in batch}:
            raise RunError(
                f"Engine {rank} scored {len(report.logprobs)} samples and was given {len(batch)}, or other ones."
            )
        for task in batch:
            found = report.logprobs[task.sample_id]
            if len(found) != len(task.response_tokens) or not all(map(math.isfinite, found)):
                raise RunError(
                    f"Engine {rank} returned {len(found)} log-probs for the {len(task.response_tokens)} response "
                    f"tokens of sample {task.sample_id}, or some that are not finite."
                )
        del self._given[rank]
        self.results |= report.logprobs
        self.scored_tokens += sum(task.tokens for task in batch)
        self.seconds += report.span.seconds

    def lose(self, rank: int) -> None:
        """An engine died: what it was scoring waits again, before all others."""
        self._waiting.extendleft(reversed(self._given.pop(rank, [])))
