"""Attention over the KV cache as one compiled loop: for few queries, on one thread of a CPU."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rlhfspec_mega.compiled import compiled, inlined, vectorized
from rlhfspec_mega.models.host_floats import Floats, Single, host_array, load, store
from rlhfspec_mega.models.host_kernels import suits_host_kernels
from rlhfspec_mega.models.transformer import Attention
from rlhfspec_mega.planning.tree import Bools, Ints
from rlhfspec_mega.rollout.torch_engine.cache import CachedAttention, Inputs, KVCache
from rlhfspec_mega.sampling.exponential import exponential

Singles = NDArray[np.float32]

# (Queries of a sample - 1) x places x head_dim, up to which this loop is quicker than matrix products: they read keys
# and values once for all queries of a sample, but have to copy them, and cost ten calls. In bfloat16 the fused kernel
# does without copies.
MOST_WORK = {torch.float32: 2**17, torch.bfloat16: 2**15}
_AT_ONCE = 4  # places whose values are added up together


def step_attention(cache: KVCache, inputs: Inputs) -> Attention:
    """The quicker attention for the inputs of a decode step."""
    work = (inputs.queries - 1) * inputs.visible.shape[1] * cache.kv.shape[-1]
    if suits_host_kernels(cache.kv) and work <= MOST_WORK[cache.kv.dtype]:
        return HostAttention(cache, inputs)
    return CachedAttention(cache, inputs)


class HostAttention:
    """As CachedAttention: implements `models.transformer.Attention` for flat inputs over their slots' cached places."""

    def __init__(self, cache: KVCache, inputs: Inputs) -> None:
        self._cache, self._rows, self._places = cache, inputs.rows.numpy(), inputs.places.numpy()
        self._seen, self._counts = _visible_places(inputs.visible.numpy())

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """[N, heads + 2 * kv_heads, head_dim] -> [N, heads, head_dim]; caches the new keys and values."""
        mixed, kv = qkv.new_empty(len(qkv), self._cache.heads, qkv.shape[2]), host_array(self._cache.kv[layer])
        rows, scale, queries = self._rows, np.float32(self._cache.scale), host_array(qkv)
        _write(queries, kv, rows, self._places, self._cache.heads)
        _attend(queries, kv, rows, self._seen, self._counts, scale, host_array(mixed))
        return mixed


@compiled
def _visible_places(visible: Bools) -> tuple[Ints, Ints]:
    """The places that each input attends to, [N, L], of which the first counts[i] count, and these counts [N]."""
    count, length = visible.shape
    places, counts = np.empty((count, length), np.int64), np.zeros(count, np.int64)
    for one in range(count):
        for place in range(length):
            if visible[one, place]:
                places[one, counts[one]] = place
                counts[one] += 1
    return places, counts


@compiled
def _write(qkv: Floats, kv: Floats, rows: Ints, places: Ints, heads: int) -> None:
    """Cache the keys and values of all inputs in kv [2, slots, kv_heads, places, head_dim]."""
    kv_heads = kv.shape[2]
    for one in range(len(qkv)):
        for part in range(2):
            for head in range(kv_heads):
                kv[part, rows[one], head, places[one]] = qkv[one, heads + part * kv_heads + head]


@vectorized
def _attend(qkv: Floats, kv: Floats, rows: Ints, seen: Ints, counts: Ints, scale: Single, mixed: Floats) -> None:
    """Softmax attention of each input's queries over the places that it sees; fills `mixed` [N, heads, head_dim]."""
    heads, kv_heads = mixed.shape[1], kv.shape[2]
    weights = np.empty(seen.shape[1], np.float32)
    for one in range(len(mixed)):
        places = seen[one, : counts[one]]
        for head in range(heads):
            keys = kv[0, rows[one], head * kv_heads // heads]
            values = kv[1, rows[one], head * kv_heads // heads]
            total = _weigh(qkv[one, head], keys, places, scale, weights)
            _add_up(values, places, weights, np.float32(1.0) / total, mixed[one, head])


@inlined
def _weigh(query: Floats, keys: Floats, places: Ints, scale: Single, weights: Singles) -> Single:
    """Fill in exp(score - best score) of each place; returns their sum."""
    count, width = len(places), len(query)
    whole = count - count % _AT_ONCE
    best = np.float32(-np.inf)
    for first in range(0, whole, _AT_ONCE):
        key0, key1 = keys[places[first]], keys[places[first + 1]]
        key2, key3 = keys[places[first + 2]], keys[places[first + 3]]
        sum0 = sum1 = sum2 = sum3 = np.float32(0.0)
        for place in range(width):
            sum0 += load(query, place) * load(key0, place)
            sum1 += load(query, place) * load(key1, place)
            sum2 += load(query, place) * load(key2, place)
            sum3 += load(query, place) * load(key3, place)
        weights[first], weights[first + 1] = sum0 * scale, sum1 * scale
        weights[first + 2], weights[first + 3] = sum2 * scale, sum3 * scale
        best = max(best, max(max(sum0, sum1), max(sum2, sum3)) * scale)
    for number in range(whole, count):
        key, score = keys[places[number]], np.float32(0.0)
        for place in range(width):
            score += load(query, place) * load(key, place)
        weights[number] = score * scale
        best = max(best, score * scale)
    total = np.float32(0.0)
    for number in range(count):
        weight = exponential(weights[number] - best)
        weights[number] = weight
        total += weight
    return total


@inlined
def _add_up(values: Floats, places: Ints, weights: Singles, factor: Single, mixed: Floats) -> None:
    """Fill in factor x the weighted sum of the values at these places."""
    count, width = len(places), len(mixed)
    whole = count - count % _AT_ONCE
    sums = np.zeros(width, np.float32)
    for first in range(0, whole, _AT_ONCE):
        value0, value1 = values[places[first]], values[places[first + 1]]
        value2, value3 = values[places[first + 2]], values[places[first + 3]]
        w0, w1, w2, w3 = weights[first], weights[first + 1], weights[first + 2], weights[first + 3]
        for place in range(width):
            first_two = w0 * load(value0, place) + w1 * load(value1, place)
            sums[place] += first_two + w2 * load(value2, place) + w3 * load(value3, place)
    for number in range(whole, count):
        value, weight = values[places[number]], weights[number]
        for place in range(width):
            sums[place] += weight * load(value, place)
    for place in range(width):
        sums[place] *= factor
    store(mixed, sums)
