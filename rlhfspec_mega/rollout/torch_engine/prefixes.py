"""Prefixes that the target has prefilled and the draft has not read: it does so once something is drafted."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rlhfspec_mega.draft.model import DraftModel
from rlhfspec_mega.rollout.torch_engine.cache import Inputs, KVCache


class UnreadPrefixes:
    """The prefixes of one prefill, padded to the longest.

    Args:
        tokens: int64 [prefixes, longest + 1]; the draft's entry t embeds token t + 1.

    Attributes:
        size: positions whose states are kept.
    """

    def __init__(self, draft: DraftModel, tokens: torch.Tensor) -> None:
        self._draft, self._tokens = draft, tokens
        self._chunks: list[tuple[int, list[torch.Tensor]]] = []  # first position, and states of each tapped layer
        self._cache: KVCache | None = None
        self.size = 0

    def add(self, first: int, states: list[torch.Tensor]) -> None:
        """Keep the target's states of the positions from `first` on, by prefix and position."""
        self._chunks.append((first, states))
        self.size += len(states[0])

    @torch.inference_mode()
    def read(self) -> None:
        """Run the draft over all prefixes; the states are not kept any longer."""
        if self._cache is None:
            weights, (count, places) = self._draft.qkv, self._tokens.shape
            self._cache = KVCache(
                self._draft.shape, slots=count, places=places - 1, dtype=weights.dtype, device=weights.device
            )
        chunks, self._chunks, self.size = self._chunks, [], 0
        for first, states in chunks:
            count = len(states[0]) // len(self._tokens)
            inputs = chunk(self._tokens, first, first + count, shift=1)
            fused = self._draft.fuse(torch.cat(states, dim=-1))
            entries = self._draft.keys_values(inputs.tokens, fused, inputs.positions)
            self._cache.write(0, inputs.rows, inputs.places, entries)

    def kv(self, row: int, length: int) -> torch.Tensor:
        """The draft's KV of the first positions of a prefix."""
        self.read()
        assert self._cache is not None
        return self._cache.prefix(row, length)


class PrefixPast(NamedTuple):
    """The draft's state for a sample that begins with a prefix: a DraftPast whose KV is computed when it is asked for.

    Attributes:
        entries: tokens of it; all but the last of the prefix.
        features: [1, 3 * hidden], the target's states at the prefix's last position.
    """

    prefixes: UnreadPrefixes
    row: int
    entries: int
    features: torch.Tensor

    def kv(self) -> torch.Tensor:
        return self.prefixes.kv(self.row, self.entries)


def chunk(tokens: torch.Tensor, first: int, end: int, shift: int) -> Inputs:
    """Inputs for positions first .. end - 1 of all rows, with the tokens `shift` positions later."""
    rows_count, device = len(tokens), tokens.device
    columns = torch.arange(end - first, device=device).repeat(rows_count)
    rows = torch.arange(rows_count, device=device).repeat_interleave(end - first)
    places = columns + first
    visible = torch.arange(end, device=device) <= places[:, None]
    chosen = tokens[:, first + shift : end + shift].flatten()
    return Inputs(chosen, places, rows, columns, places, visible, rows_count, end - first)
