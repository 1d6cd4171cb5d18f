"""Sizes of an engine's history, for those who plan with it."""

from __future__ import annotations

CHUNK = 32  # tokens that are kept together, of one sequence
# Of a prompt that another sample has just brought along, so many last tokens are stored again: they lead to its text.
PROMPT_END = 16
BYTES = 41  # at most, for each token
LEAST_KEPT = 4 * CHUNK  # tokens for each slot; with fewer, samples in slots would take each other's places


def kept_tokens(history_tokens: int, slots: int) -> int:
    """Tokens that a history keeps at most, for samples in so many slots."""
    return max(history_tokens, LEAST_KEPT * slots)


def stored_tokens(response: int) -> int:
    """Tokens of the store that `History.add` takes for a response of so many."""
    return -(-(response + PROMPT_END) // CHUNK) * CHUNK
