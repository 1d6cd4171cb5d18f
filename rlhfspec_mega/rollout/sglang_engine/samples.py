"""Samples as requests of SGLang, and what its stream of outputs says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.rollout.protocol import SampleSnapshot
from rlhfspec_mega.types import FinishReason, GenerationRequest, GenerationResult, SampleProgress

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}


def sampling_params(request: GenerationRequest, generated: int) -> dict[str, Any]:
    """SGLang's sampling parameters for the rest of a sample that has so many response tokens.

    The noise is that of the whole sample: it depends on the seed and the token's index alone.

    Raises UserError for forced lengths, which SGLang cannot mask before the noise.
    """
    if request.ignore_stop:
        raise UserError(f"Sample {request.sample_id} has a forced length, which only the torch engine decodes.")
    return {
        "temperature": request.temperature,
        "max_new_tokens": request.max_new_tokens - generated,
        "stop_token_ids": list(request.stop_tokens),
        "sampling_seed": request.seed,
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }


@dataclass
class Held:
    """A sample that this engine has.

    Attributes:
        attempt: told apart in the request's id: a sample that left and came back is another request.
        given: response tokens it came with; `tokens`, `logprobs` and `versions` begin with theirs.
        reported: tokens that the driver knows of.
        started: whether SGLang has answered with a token.
    """

    request: GenerationRequest
    attempt: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    given: int = 0
    reported: int = 0
    started: bool = False
    reason: FinishReason | None = None

    @classmethod
    def of(cls, snapshot: SampleSnapshot, attempt: int) -> Held:
        """One that began elsewhere; `snapshot.reported` None means that the driver knows all its tokens."""
        given = len(snapshot.tokens)
        reported = given if snapshot.reported is None else snapshot.reported
        lists = list(snapshot.tokens), list(snapshot.logprobs), list(snapshot.versions)
        return cls(snapshot.request, attempt, *lists, given=given, reported=reported)

    @property
    def rid(self) -> str:
        """Id of the request."""
        return f"{self.request.sample_id}/{self.attempt}"

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.request.prompt_tokens) + len(self.tokens)

    def take(self, output: Mapping[str, Any], version: int) -> None:
        """File an output of the stream: all tokens of this request so far, with their log-probs.

        Raises RunError for log-probs that do not belong to the tokens: speculation has lost some upstream before.
        """
        tokens, meta = output["output_ids"], output["meta_info"]
        found = meta["output_token_logprobs"]
        if len(found) != len(tokens) or any(token != pair[1] for token, pair in zip(tokens, found, strict=True)):
            raise RunError(
                f"SGLang returned {len(found)} log-probs for the {len(tokens)} tokens of sample "
                f"{self.request.sample_id}, or those of other tokens."
            )
        new = len(tokens) - (len(self.tokens) - self.given)
        if new > 0:
            self.tokens += tokens[-new:]
            self.logprobs += [pair[0] for pair in found[-new:]]
            self.versions += [version] * new
            self.started = True
        reason = meta.get("finish_reason")
        if reason is not None:
            self.reason = _REASONS[reason["type"]]

    def progress(self) -> SampleProgress:
        """What it has gained since the last call."""
        first, self.reported = self.reported, len(self.tokens)
        return SampleProgress(self.request.sample_id, self.tokens[first:], self.logprobs[first:], self.versions[first:])

    def result(self, reason: FinishReason) -> GenerationResult:
        """All of it."""
        return GenerationResult(self.request.sample_id, self.tokens, self.logprobs, self.versions, reason)

    def snapshot(self) -> SampleSnapshot:
        """What to go on with elsewhere; KV stays behind."""
        return SampleSnapshot(
            self.request, self.tokens, self.logprobs, self.versions, reported=min(self.reported, len(self.tokens))
        )
