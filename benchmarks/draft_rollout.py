"""Draft trees at many positions of one finished sequence at once: the draft's real entries are computed only once.

Entry t of the draft reads the target's states at position t and the token at t + 1. A tree whose last committed token
is at position r hangs from entry r - 1; its nodes attend to the entries up to there and to their own ancestors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhfspec_mega.draft.examples import Example
from rlhfspec_mega.draft.model import DraftModel


class DraftRollout:
    """Implements `verification_rules.Drafter` for a real draft.

    Args:
        roots: int64 [P], positions of the last committed tokens, from 1 to T - 1.
        banned: int64 [n], tokens that are never drafted.
    """

    def __init__(self, draft: DraftModel, example: Example, roots: Tensor, banned: Tensor):
        self._draft, self._roots, self._banned = draft, roots, banned
        entries = len(example.tokens) - 1
        positions = torch.arange(entries)
        real = _RealEntries(draft, entries)
        states = draft.advance(example.tokens[1:], draft.fuse(example.features[:-1].float()), positions, real)
        self._real = real
        self._states = states[roots - 1][:, None]  # [P, B, hidden], what the beam's entries put out
        self._path: Tensor | None = None  # [P, B, levels, 2, kv_heads, head_dim] of each beam node and its ancestors
        self._level = 0

    def root(self) -> Tensor:
        """Logits [P, 1, V] over the target's vocabulary."""
        return self._logits(self._states)

    def extend(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """Logits [P, B, V] after tokens [P, B], children of the entries `parents` [P, B] of the beam before."""
        count, width = tokens.shape
        rows = torch.arange(count)[:, None]
        attention = _BeamAttention(self._draft, self._real, self._roots, self._parents_path(rows, parents), width)
        positions = (self._roots + self._level)[:, None].expand(count, width)
        states = self._draft.advance(
            tokens.flatten(), self._states[rows, parents].flatten(0, 1), positions.flatten(), attention
        )
        self._states, self._path = states.view(count, width, -1), attention.path
        self._level += 1
        return self._logits(self._states)

    def _parents_path(self, rows: Tensor, parents: Tensor) -> Tensor | None:
        return None if self._path is None else self._path[rows, parents]

    def _logits(self, states: Tensor) -> Tensor:
        """A reduced draft vocabulary is spread over the target's: what it lacks is never drafted."""
        logits, ids = self._draft.logits(states.flatten(0, 1)).unflatten(0, states.shape[:2]), self._draft.target_ids
        if ids is not None:
            full = logits.new_full((*logits.shape[:-1], self._draft.shape.target.vocab_size), float("-inf"))
            full[..., ids] = logits
            logits = full
        return logits.index_fill_(-1, self._banned, float("-inf"))


class _RealEntries:
    """Causal attention over the sequence's own entries; keeps keys and values [kv_heads, entries, head_dim]."""

    def __init__(self, draft: DraftModel, entries: int):
        self._shape = draft.shape
        self._hidden = torch.ones(entries, entries, dtype=torch.bool).triu(1)

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        heads, kv_heads = self._shape.num_heads, self._shape.num_kv_heads
        query, self.keys, self.values = qkv.transpose(0, 1).clone().split((heads, kv_heads, kv_heads))
        query = query.unflatten(0, (kv_heads, -1)) * self._shape.head_dim**-0.5
        scores = query @ self.keys[:, None].transpose(-1, -2)
        weights = scores.masked_fill(self._hidden, float("-inf")).softmax(dim=-1)
        return (weights @ self.values[:, None]).flatten(0, 1).transpose(0, 1)


class _BeamAttention:
    """Attention of one beam layer: over the real entries before each root, the ancestors, and itself.

    Attributes:
        path: keys and values [P, B, levels, 2, kv_heads, head_dim] of ancestors and this layer's own, once called.
    """

    def __init__(self, draft: DraftModel, real: _RealEntries, roots: Tensor, ancestors: Tensor | None, width: int):
        self._shape, self._real, self._ancestors = draft.shape, real, ancestors
        self._size = (len(roots), width)
        self._hidden = torch.arange(real.keys.shape[1]) >= roots[:, None]  # [P, entries]
        self.path: Tensor

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        shape, (count, width) = self._shape, self._size
        kv_heads, group = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads
        own = qkv[:, shape.num_heads :].reshape(count, width, 1, 2, kv_heads, shape.head_dim)
        self.path = own if self._ancestors is None else torch.cat((self._ancestors, own), dim=2)
        query = qkv[:, : shape.num_heads].reshape(count, width, kv_heads, group, -1) * shape.head_dim**-0.5
        real = torch.einsum("pbkgd,ked->pbkge", query, self._real.keys)
        real = real.masked_fill(self._hidden[:, None, None, None], float("-inf"))
        branch = torch.einsum("pbkgd,pblkd->pbkgl", query, self.path[:, :, :, 0])
        entries = real.shape[-1]
        weights = torch.cat((real, branch), dim=-1).softmax(dim=-1)
        mixed = torch.einsum("pbkge,ked->pbkgd", weights[..., :entries], self._real.values)
        mixed += torch.einsum("pbkgl,pblkd->pbkgd", weights[..., entries:], self.path[:, :, :, 1])
        return mixed.reshape(count * width, shape.num_heads, -1)
