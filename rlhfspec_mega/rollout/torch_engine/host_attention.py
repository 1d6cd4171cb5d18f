"""Attention over the KV cache as one compiled loop: for few queries, on one thread of a CPU."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rlhfspec_mega.compiled import compiled, inlined, vectorized
from rlhfspec_mega.exponential import exponential
from rlhfspec_mega.models import host_cpu
from rlhfspec_mega.models.host_floats import Floats, Single, host_array, load, store
from rlhfspec_mega.models.host_kernels import suits_host_kernels
from rlhfspec_mega.models.transformer import Attention
from rlhfspec_mega.planning.tree import Bools, Ints
from rlhfspec_mega.rollout.torch_engine.cache import CachedAttention, Inputs, KVCache
from rlhfspec_mega.sampling.float_order import in_order, of_order

Singles = NDArray[np.float32]

# (Mean queries of a sample - 1) x places x head_dim, up to which this loop is quicker than matrix products, which
# read keys and values once for all queries of a sample, but have to copy them, and give all samples as many queries as
# the one with the most; in bfloat16 the fused kernel does without copies. The second number, divided by the samples, is
# for the ten calls that products take. Measured on an EPYC with AVX-512, in float32 also with AVX2 code alone: half of
# the limit takes 0.65 to 0.95 of the products' time and a tenth 0.3 to 0.8. Where MKL uses AVX-512, on a Xeon with AMX.
LIMITS = {torch.float32: (2**19, 0), torch.bfloat16: (2**18, 0)}
LIMITS_WITH_MKL = {torch.float32: (2**16, 2**17), torch.bfloat16: (2**14, 2**16)}
_AT_ONCE = 4  # places whose scores are computed, or whose values are added up, together
# Weights below exp(-60) of the largest, which no sum shows, count as 0: products with them would be denormal numbers,
# each of which takes as long as a hundred others.
_LEAST = np.float32(-60.0)
_ZERO, _ONE, _UNSEEN = np.float32(0.0), np.float32(1.0), np.float32(-np.inf)


def step_attention(cache: KVCache, inputs: Inputs) -> Attention:
    """The quicker attention for the inputs of a decode step."""
    if not suits_host_kernels(cache.kv):
        return CachedAttention(cache, inputs)
    more, dtype = len(inputs.tokens) / inputs.batch - 1, cache.kv.dtype
    work = more * inputs.visible.shape[1] * cache.kv.shape[-1]
    of_sample, of_batch = (LIMITS_WITH_MKL if host_cpu.mkl_has_avx512() else LIMITS)[dtype]
    few = work <= of_sample + of_batch / inputs.batch
    return HostAttention(cache, inputs) if few else CachedAttention(cache, inputs)


class HostAttention:
    """As CachedAttention: implements `models.transformer.Attention` for flat inputs over their slots' cached places."""

    def __init__(self, cache: KVCache, inputs: Inputs) -> None:
        self._kv, self._heads, self._scale = host_array(cache.kv), cache.heads, np.float32(cache.scale)
        self._rows, self._places, self._visible = inputs.rows.numpy(), inputs.places.numpy(), inputs.visible.numpy()
        self._spans = _spans(self._rows, self._visible)

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """[N, heads + 2 * kv_heads, head_dim] -> [N, heads, head_dim]; caches the new keys and values."""
        mixed, kv, queries = qkv.new_empty(len(qkv), self._heads, qkv.shape[2]), self._kv[layer], host_array(qkv)
        _write(queries, kv, self._rows, self._places, self._heads)
        _attend(queries, kv, self._rows, self._spans, self._visible, self._scale, host_array(mixed))
        return mixed


@compiled
def _spans(rows: Ints, visible: Bools) -> Ints:
    """[samples, 4], for each sample with inputs: its first input and the end of its inputs; how many places, from the
    first on, all of them see; the end of the places that any of them sees. Each input sees at least its own place.
    """
    count, length = visible.shape
    spans, number = np.empty((count, 4), np.int64), -1
    for one in range(count):
        settled, end = 0, length
        while settled < length and visible[one, settled]:
            settled += 1
        while end > settled and not visible[one, end - 1]:
            end -= 1
        if one == 0 or rows[one] != rows[one - 1]:
            number += 1
            spans[number, 0], spans[number, 2], spans[number, 3] = one, settled, end
        spans[number, 1] = one + 1
        spans[number, 2], spans[number, 3] = min(spans[number, 2], settled), max(spans[number, 3], end)
    return spans[: number + 1]


@compiled
def _write(qkv: Floats, kv: Floats, rows: Ints, places: Ints, heads: int) -> None:
    """Cache the keys and values of all inputs in kv [2, slots, kv_heads, places, head_dim]."""
    kv_heads = kv.shape[2]
    for one in range(len(qkv)):
        for part in range(2):
            for head in range(kv_heads):
                read, written = qkv[one, heads + part * kv_heads + head], kv[part, rows[one], head, places[one]]
                for place in range(len(read)):
                    written[place] = read[place]


@vectorized
def _attend(qkv: Floats, kv: Floats, rows: Ints, spans: Ints, visible: Bools, scale: Single, mixed: Floats) -> None:
    """Softmax attention of each input's queries over the places that it sees; fills `mixed` [N, heads, head_dim].

    A sample's queries take its keys and values in pairs, so that these are read, and widened, half as often.
    """
    kv_heads, width = kv.shape[2], kv.shape[4]
    group = mixed.shape[1] // kv_heads
    weights = np.empty((2, visible.shape[1]), np.float32)
    queries, sums = np.empty((2, width), np.float32), np.empty((2, width), np.float32)
    for number in range(len(spans)):
        first, end, settled, seen = spans[number]
        count = (end - first) * group
        for kv_head in range(kv_heads):
            keys, values = kv[0, rows[first], kv_head], kv[1, rows[first], kv_head]
            for pair in range(0, count, 2):
                for member in range(2):
                    query = min(pair + member, count - 1)  # the last one of an odd number makes a pair with itself
                    vector = qkv[first + query // group, kv_head * group + query % group]
                    for place in range(width):
                        queries[member, place] = load(vector, place) * scale
                _score(queries, keys, weights, seen)
                for member in range(2):
                    query = min(pair + member, count - 1)
                    _weigh(weights[member], visible[first + query // group], settled, seen)
                _add_up(values, weights, sums, settled, seen)
                for member in range(2):
                    query = min(pair + member, count - 1)
                    store(mixed[first + query // group, kv_head * group + query % group], sums[member])


@inlined
def _score(queries: Singles, keys: Floats, scores: Singles, count: int) -> None:
    """Fill in the products of two queries with each of the first `count` keys."""
    query0, query1, width = queries[0], queries[1], queries.shape[1]
    whole = count - count % _AT_ONCE
    for first in range(0, whole, _AT_ONCE):
        key0, key1, key2, key3 = keys[first], keys[first + 1], keys[first + 2], keys[first + 3]
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = _ZERO
        for place in range(width):
            k0, k1, k2, k3 = load(key0, place), load(key1, place), load(key2, place), load(key3, place)
            a0 += query0[place] * k0
            a1 += query0[place] * k1
            a2 += query0[place] * k2
            a3 += query0[place] * k3
            b0 += query1[place] * k0
            b1 += query1[place] * k1
            b2 += query1[place] * k2
            b3 += query1[place] * k3
        scores[0, first], scores[0, first + 1], scores[0, first + 2], scores[0, first + 3] = a0, a1, a2, a3
        scores[1, first], scores[1, first + 1], scores[1, first + 2], scores[1, first + 3] = b0, b1, b2, b3
    for number in range(whole, count):
        key = keys[number]
        a0 = b0 = _ZERO
        for place in range(width):
            a0 += query0[place] * load(key, place)
            b0 += query1[place] * load(key, place)
        scores[0, number], scores[1, number] = a0, b0


@inlined
def _weigh(scores: Singles, visible: Bools, settled: int, count: int) -> None:
    """Turn the scores of the first `count` places into weights; the first `settled` are seen, others if `visible`."""
    for place in range(settled, count):
        if not visible[place]:
            scores[place] = _UNSEEN
    highest = in_order(scores[0])
    for place in range(count):
        highest = max(highest, in_order(scores[place]))
    best, total = of_order(highest), _ZERO
    for place in range(count):
        below = scores[place] - best
        weight = exponential(below)
        weight = _ZERO if below < _LEAST else weight
        scores[place] = weight
        total += weight
    share = _ONE / total
    for place in range(count):
        scores[place] *= share


@inlined
def _add_up(values: Floats, weights: Singles, sums: Singles, settled: int, count: int) -> None:
    """Fill in the sums of the first `count` values by two rows of weights.

    Of places behind the `settled` ones, those with a weight of 0 are left out: what they hold may be infinite or NaN.
    """
    sums0, sums1, width = sums[0], sums[1], sums.shape[1]
    for place in range(width):
        sums0[place] = sums1[place] = _ZERO
    whole = settled - settled % _AT_ONCE
    for first in range(0, whole, _AT_ONCE):
        value0, value1, value2, value3 = values[first], values[first + 1], values[first + 2], values[first + 3]
        a0, a1, a2, a3 = weights[0, first], weights[0, first + 1], weights[0, first + 2], weights[0, first + 3]
        b0, b1, b2, b3 = weights[1, first], weights[1, first + 1], weights[1, first + 2], weights[1, first + 3]
        for place in range(width):
            v0, v1, v2, v3 = load(value0, place), load(value1, place), load(value2, place), load(value3, place)
            sums0[place] += (a0 * v0 + a1 * v1) + (a2 * v2 + a3 * v3)
            sums1[place] += (b0 * v0 + b1 * v1) + (b2 * v2 + b3 * v3)
    for member in range(2):
        added = sums[member]
        for number in range(whole, count):
            value, weight = values[number], weights[member, number]
            if weight != _ZERO:
                for place in range(width):
                    added[place] += weight * load(value, place)
