"""Chunked prefill of waiting groups, so that it does not delay the samples being decoded for long."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from rlhfspec_mega.draft.model import DraftModel
from rlhfspec_mega.models.transformer import Transformer
from rlhfspec_mega.rollout.protocol import DraftPast
from rlhfspec_mega.rollout.torch_engine.cache import CachedAttention, Inputs, KVCache
from rlhfspec_mega.rollout.torch_engine.drafter import Features
from rlhfspec_mega.rollout.torch_engine.scheduler import PrefixGroup


class Prefill:
    """Prefill of one batch of prefixes, padded to the longest, in KV caches of their own that the groups then keep.

    Args:
        draft: the draft, which processes the prefixes too. Its entry t needs the token at t + 1, so that the entry of
            the last position is computed in the first decode step.
    """

    def __init__(self, model: Transformer, draft: DraftModel | None, groups: Sequence[PrefixGroup]):
        longest = max(len(group.prefix) for group in groups)
        weights = model.embedding
        self._model, self._draft, self._groups = model, draft, groups
        padded = [group.prefix + (0,) * (longest + 1 - len(group.prefix)) for group in groups]
        self._tokens = torch.tensor(padded, device=weights.device)
        cache = partial(KVCache, slots=len(groups), places=longest, dtype=weights.dtype, device=weights.device)
        self._cache = cache(model.shape)
        self._draft_cache = cache(draft.shape) if draft else None
        self._last_features: dict[int, torch.Tensor] = {}  # by group: [1, TAPS * hidden] at the prefix's last position
        self._longest, self._done = longest, 0

    def advance(self, max_tokens: int) -> bool:
        """Prefill up to `max_tokens` (at least 1) more positions of each prefix; returns whether all are complete."""
        end = min(self._done + max_tokens, self._longest)
        inputs = self._chunk(self._done, end, shift=0)
        features = Features(self._draft.shape.taps) if self._draft else None
        self._model.hidden(inputs.tokens, inputs.positions, CachedAttention(self._cache, inputs), features)
        if self._draft and self._draft_cache and features:
            inputs, states = self._chunk(self._done, end, shift=1), features.concatenated()
            attention = CachedAttention(self._draft_cache, inputs)
            self._draft.advance(inputs.tokens, self._draft.fuse(states), inputs.positions, attention)
            self._keep_last(states.unflatten(0, (len(self._groups), -1)), end)
        self._done = end
        if end < self._longest:
            return False
        for row, group in enumerate(self._groups):
            group.kv = self._cache.prefix(row, len(group.prefix))
            if self._draft_cache:
                kv = self._draft_cache.prefix(row, len(group.prefix) - 1)
                group.draft = DraftPast(kv, self._last_features[row])
        return True

    def _chunk(self, first: int, end: int, shift: int) -> Inputs:
        """Inputs for positions first .. end - 1 of every group, with the tokens `shift` positions later."""
        groups, device = len(self._groups), self._tokens.device
        columns = torch.arange(end - first, device=device).repeat(groups)
        rows = torch.arange(groups, device=device).repeat_interleave(end - first)
        places = columns + first
        tokens = self._tokens[:, first + shift : end + shift].flatten()
        visible = torch.arange(end, device=device) <= places[:, None]
        return Inputs(tokens, places, rows, columns, places, visible, groups, end - first)

    def _keep_last(self, states: torch.Tensor, end: int) -> None:
        for row, group in enumerate(self._groups):
            if self._done < len(group.prefix) <= end:
                self._last_features[row] = states[row, len(group.prefix) - 1 - self._done][None].clone()
