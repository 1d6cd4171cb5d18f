"""What the manager, resharding and migration expect of a generation engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch

from rlhfspec_mega.observe.spans import SpanRecorder
from rlhfspec_mega.rollout.migration.staging import Layout
from rlhfspec_mega.types import (
    EngineLoad,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    SampleProgress,
    TensorInfo,
    WeightTarget,
)


@dataclass
class DraftPast:
    """What a draft needs of a sample's past, without its tokens.

    Attributes:
        kv: [1, 2, kv_heads, entries, head_dim] of the tokens it has read.
        features: [n, 3 * hidden], the target's states that belong to the last n tokens, which it has not read yet.
    """

    kv: torch.Tensor
    features: torch.Tensor


@dataclass
class SampleSnapshot:
    """State of an unfinished sample, enough to go on elsewhere with the same tokens (noise is keyed: no random state).

    Attributes:
        kv: [layers, 2, kv_heads, positions, head_dim] of the settled positions, or None: the importer prefills again.
        draft: the draft's part; without it an engine that drafts prefills again.
        reported: tokens that the driver knows of; None: all.
    """

    request: GenerationRequest
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    kv: torch.Tensor | None = None
    draft: DraftPast | None = None
    reported: int | None = None


@dataclass
class LiveSample:
    """An unfinished sample in an engine and its response so far; `reported`: tokens of it that the driver knows."""

    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    reported: int = 0

    @classmethod
    def of(cls, snapshot: SampleSnapshot) -> Self:
        """One that comes from elsewhere, or begins."""
        reported = len(snapshot.tokens) if snapshot.reported is None else snapshot.reported
        return cls(snapshot.request, list(snapshot.tokens), list(snapshot.logprobs), list(snapshot.versions), reported)

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.request.prompt_tokens) + len(self.tokens)

    @property
    def sequence(self) -> tuple[int, ...]:
        return (*self.request.prompt_tokens, *self.tokens)

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float], version: int) -> FinishReason | None:
        """Add tokens up to the one that ends the sample; the reason if there is one."""
        stops = () if self.request.ignore_stop else self.request.stop_tokens
        for token, logprob in zip(tokens, logprobs, strict=True):
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self.versions.append(version)
            if token in stops:
                return FinishReason.STOP
            if len(self.tokens) >= self.request.max_new_tokens:
                return FinishReason.LENGTH
        return None

    def progress(self) -> SampleProgress:
        """What came since the last call."""
        new, self.reported = slice(self.reported, None), len(self.tokens)
        return SampleProgress(self.request.sample_id, self.tokens[new], self.logprobs[new], self.versions[new])

    def result(self, reason: FinishReason) -> GenerationResult:
        return GenerationResult(self.request.sample_id, self.tokens, self.logprobs, self.versions, reason)

    def snapshot(self, kv: torch.Tensor | None = None, draft: DraftPast | None = None) -> SampleSnapshot:
        """What to go on with elsewhere."""
        return SampleSnapshot(self.request, self.tokens, self.logprobs, self.versions, kv, draft, self.reported)


class RolloutEngine(Protocol):
    """One generation engine. Calls come from one thread; decoding happens only inside `poll`.

    Attributes:
        least_copy: bytes of KV to ask for at once: of fewer the call costs more than the copy.
        turn_seconds: of decoding between two looks at migrations; 0: one step.
        max_positions: tokens of prompt and response that the engine holds of a sample.
        last_decode: when the last decode step began, in seconds since the epoch, and its seconds.
        spans: what the time goes into.
    """

    least_copy: int
    turn_seconds: float
    max_positions: int
    last_decode: tuple[float, float]
    spans: SpanRecorder

    @property
    def idle(self) -> bool:
        """Whether the engine holds no sample."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue samples. Raises UserError for one that is malformed or can never fit; then none is queued."""

    def poll(self, seconds: float) -> list[GenerationResult]:
        """Decode for at most about `seconds` or until idle; return samples finished since the last poll."""

    def progress(self) -> list[SampleProgress]:
        """What unfinished samples have gained since the last call; enough, added up, to go on with them elsewhere."""

    def clear(self) -> None:
        """Forget every sample, finished or not: the rollout was given up."""

    def abort(self, sample_ids: Sequence[str]) -> list[GenerationResult]:
        """Stop these samples and return what they have (finish reason ABORTED); unknown or finished ids are skipped."""

    def load(self) -> EngineLoad:
        """Load figures now."""

    def begin_update(
        self, version: int, tensors: Sequence[TensorInfo], target: WeightTarget = WeightTarget.ACTOR
    ) -> None:
        """Announce new weights of the target; no decoding until `end_update`.

        Versions of the two targets are counted apart. Raises RunError on a name or shape it does not hold.
        """

    def update_weights(self, pieces: Sequence[tuple[str, int, torch.Tensor]]) -> None:
        """Write pieces (name, first element in the flattened full tensor, flat values) of the announced tensors."""

    def end_update(self, version: int) -> None:
        """Make the weights live.

        Raises RunError when elements are missing or not finite, or the version is not the announced one.
        """

    def abandon_draft_update(self) -> None:
        """Give up an update of the draft that was begun and will not be ended; without one nothing happens."""

    def holds(self, sample_id: str) -> bool:
        """Whether this engine has the sample, decoding or waiting."""

    def waits(self, sample_id: str) -> bool:
        """Whether the sample is here and not being decoded yet."""

    def request(self, sample_id: str) -> GenerationRequest:
        """The request of a sample that this engine has."""

    def settled(self, sample_id: str) -> dict[str, int] | None:
        """Positions whose KV no longer changes, of the "target" and, where one follows the sample, the "draft".

        None unless the sample is being decoded here.
        """

    def read_ahead(self, sample_ids: Sequence[str]) -> None:
        """Let the draft read what it has not read of decoding samples, so that little but settled KV is to be moved."""

    def kv_layout(self, positions: int) -> Layout:
        """Of the KV of a sample of so many tokens."""

    def settled_kv(self, sample_id: str, part: str, first: int, last: int) -> torch.Tensor:
        """[layers, 2, kv_heads, last - first, head_dim] of a decoding sample's KV, valid until the next step.

        Fewer positions of one that has just ended, in an engine that decodes between two polls.
        """

    def export_sample(self, sample_id: str, with_kv: bool = True) -> SampleSnapshot:
        """State of an unfinished sample, with its KV if it is being decoded; it leaves this engine.

        Args:
            with_kv: false if the settled KV was copied before; `draft.kv` is then empty.

        Raises RunError for a sample that is not here, or that has ended.
        """

    def import_sample(self, snapshot: SampleSnapshot) -> None:
        """Go on with a sample exported elsewhere. Raises UserError if it does not fit."""

    def stats(self) -> dict[str, Any]:
        """Counters since start, for metrics."""
