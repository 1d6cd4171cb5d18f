"""Prefixes that the target has prefilled and the draft has not read: it does so once something is drafted."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from rlhfspec_mega.draft.model import DraftModel
from rlhfspec_mega.planning.tree import Ints
from rlhfspec_mega.rollout.torch_engine.cache import Inputs, KVCache


class UnreadPrefixes:
    """The prefixes of one prefill.

    Args:
        tokens: int64 [prefixes, longest + 1], padded; the draft's entry t embeds token t + 1.
        lengths: [prefixes].

    Attributes:
        size: positions whose states are kept.
    """

    def __init__(self, draft: DraftModel, tokens: torch.Tensor, lengths: Ints) -> None:
        self._draft, self._tokens, self._lengths = draft, tokens, lengths
        self._chunks: list[tuple[int, int, list[torch.Tensor]]] = []  # see `add`
        self._cache: KVCache | None = None
        self.size = 0

    def add(self, first: int, end: int, states: list[torch.Tensor]) -> None:
        """Keep the target's states, by tapped layer, of the positions first .. end - 1, in the order of `chunk`."""
        self._chunks.append((first, end, states))
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
        for first, end, states in chunks:
            inputs = chunk(self._tokens, self._lengths, first, end, shift=1)
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


def chunk(tokens: torch.Tensor, lengths: Ints, first: int, end: int, shift: int) -> Inputs:
    """Inputs for the positions first .. end - 1 of all rows that are so long, with the tokens `shift` positions later.

    Args:
        tokens: int64 [rows, longest + shift], padded.
    """
    counts = np.clip(lengths - first, 0, end - first)
    own = np.repeat(np.arange(len(counts)), counts)
    columns = np.arange(len(own)) - np.repeat(counts.cumsum() - counts, counts)
    rows, columns, places = torch.from_numpy(np.stack((own, columns, columns + first))).to(tokens.device)
    visible = torch.arange(end, device=tokens.device) <= places[:, None]
    return Inputs(tokens[rows, places + shift], places, rows, columns, places, visible, len(counts), int(counts.max()))
