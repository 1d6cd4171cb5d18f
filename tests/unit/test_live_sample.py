"""How a sample takes the tokens of a step: as one after the other would be taken."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rlhfspec_mega.rollout.protocol import LiveSample
from rlhfspec_mega.types import FinishReason, GenerationRequest

REQUEST = GenerationRequest("a", "g", (1, 2), seed=0, max_new_tokens=6, stop_tokens=(0, 9))


def one_by_one(sample: LiveSample, tokens: list[int], logprobs: list[float], version: int) -> FinishReason | None:
    request = sample.request
    for token, logprob in zip(tokens, logprobs, strict=True):
        sample.tokens.append(token)
        sample.logprobs.append(logprob)
        sample.versions.append(version)
        if token in request.stop_tokens and not request.ignore_stop:
            return FinishReason.STOP
        if len(sample.tokens) >= request.max_new_tokens:
            return FinishReason.LENGTH
    return None


@given(st.lists(st.lists(st.integers(0, 9), max_size=9), max_size=6), st.booleans())
def test_a_step_is_taken_as_its_tokens_one_by_one(steps: list[list[int]], ignore_stop: bool) -> None:
    """Stop tokens before, at and behind the limit; forced lengths; steps without tokens."""
    request = replace(REQUEST, ignore_stop=ignore_stop)
    sample, expected = LiveSample(request), LiveSample(request)
    for version, tokens in enumerate(steps):
        logprobs = [-0.1 * token for token in tokens]
        reason = sample.extend(tokens, logprobs, version)
        assert reason == one_by_one(expected, tokens, logprobs, version)
        assert (sample.tokens, sample.logprobs, sample.versions) == (
            expected.tokens,
            expected.logprobs,
            expected.versions,
        )
        if reason is not None:
            return
