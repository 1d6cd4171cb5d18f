"""A sample as a request to SGLang: its sampling parameters, and the processing of its output stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.rollout.protocol import LiveSample
from rlhfspec_mega.types import FinishReason, GenerationRequest


def sampling_params(request: GenerationRequest, generated: int) -> dict[str, Any]:
    """SGLang's sampling parameters for the rest of a sample that has `generated` response tokens already.

    The noise is that of the whole sample: it depends on the seed and the token's index alone.

    Raises UserError for a request with a forced length: SGLang cannot mask end tokens before the noise is added.
    """
    if request.ignore_stop:
        raise UserError(f"Sample {request.sample_id} has a forced length, which only the torch engine decodes.")
    return {
        "temperature": request.temperature,
        "max_new_tokens": request.max_new_tokens - generated,
        "stop_token_ids": list(request.stop_tokens),
        "sampling_seed": request.seed,
    }


def aborted(output: Mapping[str, Any]) -> bool:
    """Whether this output says that SGLang has aborted the request."""
    reason = output["meta_info"].get("finish_reason")
    return reason is not None and reason["type"] == "abort"


@dataclass
class SGLangSample(LiveSample):
    """An unfinished sample and its current request to SGLang.

    Attributes:
        attempt: number of the request, part of its id, because a sample may need several requests.
        given: number of response tokens that this request began with.
        started: whether SGLang has returned a token for this request.
        outputs: number of outputs since the start of the poll; each is one decode step.
        submitted: whether the request was sent to SGLang.
        abort_requested: whether SGLang was told to abort the request.
    """

    attempt: int = 0
    given: int = 0
    started: bool = False
    outputs: int = 0
    submitted: bool = False
    abort_requested: bool = False
    reason: FinishReason | None = None

    def new_request(self, attempt: int) -> None:
        """Start a new request, which continues from the tokens so far."""
        self.attempt, self.given = attempt, len(self.tokens)
        self.submitted = self.abort_requested = self.started = False

    @property
    def rid(self) -> str:
        """The request's id in SGLang."""
        return f"{self.request.sample_id}/{self.attempt}/"  # SGLang aborts by prefix

    def take(self, output: Mapping[str, Any], version: int) -> None:
        """Process an output of the stream: all tokens of this request so far, with their log-probs.

        Raises RunError for log-probs that do not match the tokens (SGLang's speculation has lost some in earlier
        versions), and for a sample that SGLang aborted or ended for another reason than requested.
        """
        tokens, meta = output["output_ids"], output["meta_info"]
        found, reason = meta["output_token_logprobs"], meta.get("finish_reason")
        if aborted(output):
            raise RunError(f"SGLang gave sample {self.request.sample_id} up: {reason.get('message')}")
        known = len(self.tokens) - self.given
        fresh = list(zip(tokens[known:], found[known:], strict=False))
        if len(found) != len(tokens) or any(token != pair[1] for token, pair in fresh):
            raise RunError(
                f"SGLang returned {len(found)} log-probs for the {len(tokens)} tokens of sample "
                f"{self.request.sample_id}, or those of other tokens."
            )
        # SGLang compares the number of tokens with the limit before it looks for a stop token: if one speculative step
        # accepts a stop token and enough tokens to reach the limit, its output goes on behind the stop token.
        if self.reason is None:
            self.reason = self.extend([token for token, _ in fresh], [pair[0] for _, pair in fresh], version)
        self.started |= bool(fresh)
        self.outputs += bool(fresh)
        if reason is not None and self.reason is None:
            raise RunError(
                f"SGLang ended sample {self.request.sample_id} after {len(self.tokens)} of "
                f"{self.request.max_new_tokens} tokens by {dict(reason)}: its model's own end-of-text tokens, or a "
                "shorter context than this engine was told, are not those of the run."
            )
