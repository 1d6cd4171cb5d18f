"""The interface of a generation engine, as the rollout manager, resharding and migration use it."""

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
    """The draft model's state for a sample, without the tokens: its KV cache and the features it still has to process.

    Attributes:
        kv: [1, 2, kv_heads, entries, head_dim] of the tokens that the draft has processed.
        features: [n, 3 * hidden], the target's hidden states for the last n tokens, which the draft has not processed
            yet.
    """

    kv: torch.Tensor
    features: torch.Tensor


@dataclass
class SampleSnapshot:
    """State of an unfinished sample, enough for another engine to continue it with the same tokens.

    There is no random state: the noise depends only on the sample's seed and the position.

    Attributes:
        kv: [layers, 2, kv_heads, positions, head_dim] of the committed positions; None: the importing engine prefills
            the sample again.
        draft: state of the draft model; without it an engine with a draft prefills the sample again.
        reported: number of response tokens that the driver knows; None: all of them.
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
    """An unfinished sample in an engine and its response so far; the driver knows the first `reported` tokens."""

    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    reported: int = 0

    @classmethod
    def of(cls, snapshot: SampleSnapshot) -> Self:
        """The sample of a snapshot, whether it is new or comes from another engine."""
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
        """Add tokens up to the one that ends the sample; returns why it ended, or None if it has not."""
        request, reason = self.request, None
        count = max(0, min(len(tokens), request.max_new_tokens - len(self.tokens)))
        if not request.ignore_stop:
            for place in range(count):
                if tokens[place] in request.stop_tokens:
                    count, reason = place + 1, FinishReason.STOP
                    break
        self.tokens += tokens[:count]
        self.logprobs += logprobs[:count]
        self.versions += [version] * count
        if reason is None and len(self.tokens) >= request.max_new_tokens:
            reason = FinishReason.LENGTH
        return reason

    def progress(self) -> SampleProgress:
        """Return the tokens that each unfinished sample gained since the last call.

        All reports of a sample together are enough for another engine to continue it.
        """
        new, self.reported = slice(self.reported, None), len(self.tokens)
        return SampleProgress(self.request.sample_id, self.tokens[new], self.logprobs[new], self.versions[new])

    def result(self, reason: FinishReason) -> GenerationResult:
        return GenerationResult(self.request.sample_id, self.tokens, self.logprobs, self.versions, reason)

    def snapshot(self, kv: torch.Tensor | None = None, draft: DraftPast | None = None) -> SampleSnapshot:
        """The state from which another engine can continue the sample."""
        return SampleSnapshot(self.request, self.tokens, self.logprobs, self.versions, kv, draft, self.reported)


class RolloutEngine(Protocol):
    """One generation engine. Calls come from one thread; decoding happens only inside `poll`.

    Attributes:
        min_copy_bytes: least KV to read in one call of `committed_kv`; for less, the call costs more than the copy.
        poll_interval: shortest useful time of a poll, after which the worker looks at migrations and at free slots; 0:
            one decode step.
        max_positions: longest prompt + response, in tokens.
        last_decode: start of the last decode step, in seconds since the epoch, and its duration in seconds.
        spans: records what the engine spends its time on.
    """

    min_copy_bytes: int
    poll_interval: float
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
        """Tokens of unfinished samples since the last call; all of them together let another engine continue."""

    def clear(self) -> None:
        """Drop every sample, finished or not, because the rollout was abandoned."""

    def abort(self, sample_ids: Sequence[str]) -> list[GenerationResult]:
        """Stop these samples and return their tokens so far (finish reason ABORTED); skips unknown or finished ids."""

    def load(self) -> EngineLoad:
        """The current load."""

    def begin_update(
        self, version: int, tensors: Sequence[TensorInfo], target: WeightTarget = WeightTarget.ACTOR
    ) -> None:
        """Announce new weights of the actor or the draft; the engine does not decode until `end_update`.

        Actor and draft have separate version counters. Raises RunError on a name or shape that the model does not have.
        """

    def update_weights(self, pieces: Sequence[tuple[str, int, torch.Tensor]]) -> None:
        """Write pieces (name, first element in the flattened full tensor, flat values) of the announced tensors."""

    def end_update(self, version: int) -> None:
        """Make the weights live.

        Raises RunError when elements are missing or not finite, or the version is not the announced one.
        """

    def abandon_draft_update(self) -> None:
        """Cancel an unfinished update of the draft; does nothing if there is none."""

    def has_sample(self, sample_id: str) -> bool:
        """Whether this engine has the sample, running or waiting."""

    def is_waiting(self, sample_id: str) -> bool:
        """Whether this engine has the sample but has not begun to decode it."""

    def request(self, sample_id: str) -> GenerationRequest:
        """The request of a sample that this engine has."""

    def committed_positions(self, sample_id: str) -> dict[str, int] | None:
        """Number of committed positions, whose KV no longer changes, by part: "target", and "draft" if it has a state.

        None unless the sample is being decoded here.
        """

    def catch_up_draft(self, sample_ids: Sequence[str]) -> None:
        """Run the draft over the tokens of these running samples that it has not processed yet.

        A migration then transfers hardly anything but KV; otherwise it would include the target's hidden states of
        these tokens, which are larger than the draft's KV.
        """

    def kv_layout(self, positions: int) -> Layout:
        """Layout of a sample's KV for this number of positions."""

    def committed_kv(self, sample_id: str, part: str, first: int, last: int) -> torch.Tensor:
        """KV [layers, 2, kv_heads, last - first, head_dim] of a running sample, valid until the next step.

        An engine that also decodes between two polls returns fewer positions for a sample that has just ended.
        """

    def export_sample(self, sample_id: str, with_kv: bool = True) -> SampleSnapshot:
        """Remove an unfinished sample from this engine and return its state, with its KV if it is being decoded.

        Args:
            with_kv: false if the committed KV was copied before; `kv` is then None and `draft.kv` is empty.

        Raises RunError for a sample that is not here, or that has ended.
        """

    def import_sample(self, snapshot: SampleSnapshot) -> None:
        """Continue a sample that another engine has exported. Raises UserError if it does not fit."""

    def stats(self) -> dict[str, Any]:
        """Counters since start, for metrics."""
