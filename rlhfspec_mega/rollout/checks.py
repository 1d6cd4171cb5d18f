"""What an engine refuses before it queues a sample."""

from __future__ import annotations

from collections.abc import Set

import torch

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.rollout.protocol import DraftPast, SampleSnapshot
from rlhfspec_mega.types import GenerationRequest

MIN_TEMPERATURE = 0.01  # below, logits / T leaves float32 too few bits between neighbours


def check_request(request: GenerationRequest, vocab_size: int, max_positions: int, taken: Set[str]) -> None:
    """Raises UserError if the request is malformed, too long for the KV cache, or its id is among the `taken`."""
    name = f"Sample {request.sample_id}"
    if request.sample_id in taken:
        raise UserError(f"{name} is already in this engine; give every sample of a run its own id.")
    if not request.prompt_tokens:
        raise UserError(f"{name} has an empty prompt; start it with at least one token, for example <bos>.")
    if request.max_new_tokens < 1:
        raise UserError(f"{name} asks for {request.max_new_tokens} new tokens; ask for at least 1.")
    total = len(request.prompt_tokens) + request.max_new_tokens
    if total > max_positions:
        raise UserError(
            f"{name} needs {len(request.prompt_tokens)} prompt + {request.max_new_tokens} new tokens = {total}, but "
            f"the engine holds {max_positions} positions; shorten the prompt or lower rollout.max_new_tokens."
        )
    for token in (*request.prompt_tokens, *request.stop_tokens):
        if not 0 <= token < vocab_size:
            raise UserError(f"{name} holds token {token}, outside the vocabulary of {vocab_size}; check the tokenizer.")
    if request.ignore_stop and len(set(request.stop_tokens)) >= vocab_size:
        raise UserError(f"{name} ignores its stop tokens, which are the whole vocabulary; leave it one to choose.")
    if request.temperature != 0 and not MIN_TEMPERATURE <= request.temperature < float("inf"):
        raise UserError(f"{name} has temperature {request.temperature}; use 0 (greedy) or {MIN_TEMPERATURE} and more.")
    if not 0 <= request.seed < 1 << 63:
        raise UserError(f"{name} has seed {request.seed}, not 63 bits; take it from sampling.noise.sample_seed.")


def check_snapshot(snapshot: SampleSnapshot, cache: torch.Tensor) -> None:
    """Raises UserError if the progress is inconsistent or its KV does not fit `cache` [layers, 2, slots, ...]."""
    name = f"Sample {snapshot.request.sample_id}"
    done = len(snapshot.tokens)
    if not done == len(snapshot.logprobs) == len(snapshot.versions) or done >= snapshot.request.max_new_tokens:
        raise UserError(
            f"{name} cannot be imported with {done} tokens, {len(snapshot.logprobs)} log-probs and "
            f"{len(snapshot.versions)} versions of at most {snapshot.request.max_new_tokens}; "
            "import only unfinished samples, as exported."
        )
    if snapshot.kv is None:
        return
    layers, _, _, kv_heads, _, head_dim = cache.shape
    expected = (layers, 2, kv_heads, len(snapshot.request.prompt_tokens) + done - 1, head_dim)
    if tuple(snapshot.kv.shape) != expected:
        raise UserError(
            f"{name} brings KV of shape {tuple(snapshot.kv.shape)}, this engine needs {expected}; "
            "import it without KV, or from an engine of the same model."
        )


def check_draft_past(snapshot: SampleSnapshot, own: DraftPast, room: int) -> None:
    """Raises UserError if the draft's part of a snapshot does not fit this engine's draft, or not all tokens.

    Args:
        own: of this engine's draft, of a sample of any number of tokens.
        room: unread tokens that the engine can hold.
    """
    past = snapshot.draft
    if past is None:
        return
    sizes, wanted = ((one.kv.shape[:3], one.kv.shape[4:], one.features.shape[1:]) for one in (past, own))
    tokens, unread = len(snapshot.request.prompt_tokens) + len(snapshot.tokens), len(past.features)
    if sizes != wanted or past.kv.shape[3] + unread != tokens - 1 or unread > room:
        raise UserError(
            f"Sample {snapshot.request.sample_id} of {tokens} tokens brings a draft's past of shapes "
            f"{tuple(past.kv.shape)} and {tuple(past.features.shape)}, which do not fit this engine's draft; "
            "import it without its draft part, or from an engine with the same draft."
        )
