"""Chunked prefill of waiting groups, so that it does not delay the samples being decoded for long."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rlhfspec_mega.models.transformer import Transformer
from rlhfspec_mega.rollout.torch_engine.cache import CachedAttention, KVCache
from rlhfspec_mega.rollout.torch_engine.drafter import Drafter
from rlhfspec_mega.rollout.torch_engine.prefixes import PrefixPast, chunk
from rlhfspec_mega.rollout.torch_engine.scheduler import PrefixGroup
from rlhfspec_mega.rollout.torch_engine.unread import Features


class Prefill:
    """Prefill of one batch of prefixes, in KV caches of their own that the groups then keep.

    Args:
        drafter: takes the prefixes, too. The draft's entry t needs the token at t + 1, so that the entry of the last
            position is computed in the first decode step.
    """

    def __init__(self, model: Transformer, drafter: Drafter | None, groups: Sequence[PrefixGroup]):
        self._lengths = np.array([len(group.prefix) for group in groups])
        longest = int(self._lengths.max())
        weights = model.embedding
        self._model, self._groups = model, groups
        padded = [group.prefix + (0,) * (longest + 1 - len(group.prefix)) for group in groups]
        self._tokens = torch.tensor(padded, device=weights.device)
        self._cache = KVCache(
            model.shape, slots=len(groups), places=longest, dtype=weights.dtype, device=weights.device
        )
        self._drafter = drafter
        self._unread = drafter.new_prefixes(self._tokens, self._lengths) if drafter else None
        self._last_features: dict[int, torch.Tensor] = {}  # by group: [1, TAPS * hidden] at the prefix's last position
        self._longest, self._done = longest, 0

    def advance(self, max_tokens: int) -> bool:
        """Prefill up to `max_tokens` (at least 1) more positions of each prefix; returns whether all are complete."""
        end = min(self._done + max_tokens, self._longest)
        inputs = chunk(self._tokens, self._lengths, self._done, end, shift=0)
        features = Features(self._drafter.model.shape.taps) if self._drafter else None
        self._model.hidden(inputs.tokens, inputs.positions, CachedAttention(self._cache, inputs), features)
        if self._drafter and self._unread and features:
            self._unread.add(self._done, end, features.outputs())
            self._keep_last(features, end)
            self._drafter.bound_prefixes()
        self._done = end
        if end < self._longest:
            return False
        for row, group in enumerate(self._groups):
            group.kv = self._cache.prefix(row, len(group.prefix))
            if self._unread:
                group.draft = PrefixPast(self._unread, row, len(group.prefix) - 1, self._last_features[row])
        return True

    def _keep_last(self, features: Features, end: int) -> None:
        """Keep the states of the last positions of prefixes that end in this chunk."""
        ending = np.flatnonzero((self._done < self._lengths) & (self._lengths <= end))
        if len(ending):
            last = np.clip(self._lengths - self._done, 0, end - self._done).cumsum()[ending] - 1
            places = torch.from_numpy(last).to(self._tokens.device)
            states = torch.cat([output[places] for output in features.outputs()], dim=-1)
            self._last_features |= dict(zip(ending.tolist(), states.split(1), strict=True))
