"""Prefill of waiting groups, some tokens at a time, so that the samples being decoded are not held up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlhfspec_mega.models.transformer import Transformer
from rlhfspec_mega.rollout.torch_engine.cache import CachedAttention, KVCache
from rlhfspec_mega.rollout.torch_engine.scheduler import PrefixGroup


class Prefill:
    """One batch of prefixes, padded to the longest, in a KV cache of its own that the groups then keep."""

    def __init__(self, model: Transformer, groups: Sequence[PrefixGroup]):
        longest = max(len(group.prefix) for group in groups)
        weights = model.embedding
        self._model = model
        self._groups = groups
        self._tokens = torch.tensor(
            [group.prefix + (0,) * (longest - len(group.prefix)) for group in groups], device=weights.device
        )
        self._cache = KVCache(
            model.shape, slots=len(groups), positions=longest, dtype=weights.dtype, device=weights.device
        )
        self._done = 0

    def advance(self, max_tokens: int) -> bool:
        """Prefill up to `max_tokens` (at least one) more positions of each prefix; True when the groups are ready."""
        tokens = self._tokens[:, self._done : self._done + max_tokens]
        end = self._done + tokens.shape[1]
        positions = torch.arange(self._done, end, device=tokens.device)
        visible = torch.arange(end, device=tokens.device) <= positions[:, None]
        attention = CachedAttention(self._cache, positions.expand_as(tokens), visible.expand(len(tokens), -1, -1))
        self._model.hidden(tokens, positions.expand_as(tokens), attention)
        self._done = end
        if end < self._tokens.shape[1]:
            return False
        for row, group in enumerate(self._groups):
            group.kv = self._cache.prefix(row, len(group.prefix))
        return True
