"""Checks of requests and snapshots before an engine queues them."""

from __future__ import annotations

from collections.abc import Set

import torch

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.rollout.protocol import DraftPast, SampleSnapshot
from rlhfspec_mega.types import GenerationRequest

MIN_TEMPERATURE = 0.01  # below, float32 is too coarse to tell neighbouring values of logits / T apart


def check_request(request: GenerationRequest, vocab_size: int, max_positions: int, taken: Set[str]) -> None:
    """Raises UserError if the request is malformed, too long for the KV cache, or its id is among the `taken`."""
    name = f"Sample {request.sample_id}"
    if request.sample_id in taken:
        raise UserError(f"{name} is already in this engine; give every sample of a run a unique id.")
    if not request.prompt_tokens:
        raise UserError(f"{name} has an empty prompt; start it with at least one token, for example <bos>.")
    if request.max_new_tokens < 1:
        raise UserError(f"{name} asks for {request.max_new_tokens} new tokens; ask for at least 1.")
    total = len(request.prompt_tokens) + request.max_new_tokens
    if total > max_positions:
        raise UserError(
            f"{name} needs {len(request.prompt_tokens)} prompt + {request.max_new_tokens} new tokens = {total}, but "
            f"the engine has room for {max_positions}; shorten the prompt or lower rollout.max_new_tokens."
        )
    for token in (*request.prompt_tokens, *request.stop_tokens):
        if not 0 <= token < vocab_size:
            raise UserError(f"{name} has token {token}, outside the vocabulary of {vocab_size}; check the tokenizer.")
    if request.ignore_stop and len(set(request.stop_tokens)) >= vocab_size:
        raise UserError(f"{name} ignores its stop tokens, but every token is one; leave at least one other token.")
    if request.temperature != 0 and not MIN_TEMPERATURE <= request.temperature < float("inf"):
        raise UserError(f"{name} has temperature {request.temperature}; use 0 (greedy) or at least {MIN_TEMPERATURE}.")
    if not 0 <= request.seed < 1 << 63:
        raise UserError(f"{name} has seed {request.seed}, outside [0, 2^63); take it from sampling.noise.sample_seed.")


def check_snapshot(snapshot: SampleSnapshot, cache: torch.Tensor) -> None:
    """Raises UserError if a snapshot is inconsistent or its KV does not fit `cache` [layers, 2, slots, ...]."""
    name = f"Sample {snapshot.request.sample_id}"
    done = len(snapshot.tokens)
    if not done == len(snapshot.logprobs) == len(snapshot.versions) or done >= snapshot.request.max_new_tokens:
        raise UserError(
            f"{name} cannot be imported with {done} tokens, {len(snapshot.logprobs)} log-probs and "
            f"{len(snapshot.versions)} versions, with at most {snapshot.request.max_new_tokens} new tokens; import "
            "only unfinished samples, as they were exported."
        )
    if snapshot.kv is None:
        return
    layers, _, _, kv_heads, _, head_dim = cache.shape
    expected = (layers, 2, kv_heads, len(snapshot.request.prompt_tokens) + done - 1, head_dim)
    if tuple(snapshot.kv.shape) != expected:
        raise UserError(
            f"{name} has KV of shape {tuple(snapshot.kv.shape)}, and this engine needs {expected}; "
            "import it without KV, or from an engine of the same model."
        )


def check_draft_past(snapshot: SampleSnapshot, own: DraftPast, max_unread: int) -> None:
    """Raises UserError if a snapshot's draft state does not fit this engine's draft or does not cover all tokens.

    Args:
        own: a state of this engine's draft, for a sample of any length, to compare shapes with.
        max_unread: most features that the engine can keep for a sample.
    """
    past = snapshot.draft
    if past is None:
        return
    sizes, wanted = ((one.kv.shape[:3], one.kv.shape[4:], one.features.shape[1:]) for one in (past, own))
    tokens, unread = len(snapshot.request.prompt_tokens) + len(snapshot.tokens), len(past.features)
    if sizes != wanted or past.kv.shape[3] + unread != tokens - 1 or unread > max_unread:
        raise UserError(
            f"Sample {snapshot.request.sample_id} of {tokens} tokens has a draft state with KV of shape "
            f"{tuple(past.kv.shape)} and features of shape {tuple(past.features.shape)}, which do not fit this "
            "engine's draft; import it without its draft state, or from an engine with the same draft."
        )
