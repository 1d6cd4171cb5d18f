"""Which data-parallel rank trains which sequences, and in which micro-batches, within a token budget."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Batching:
    """How sequences become micro-batches.

    Attributes:
        max_tokens: most tokens of a micro-batch, padding included; only a sequence that is longer exceeds it.
        packed: the sequences of a micro-batch lie one after the other in one row, and attention keeps them apart;
            otherwise each has a row, and all rows are padded to the longest.
    """

    max_tokens: int
    packed: bool = True


def shard(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of the sequences of each rank, longest first; token counts are balanced by giving the next longest
    sequence to the rank with the fewest tokens (LPT, Graham 1969)."""
    shards: list[list[int]] = [[] for _ in range(ranks)]
    fewest = [(0, 0, rank) for rank in range(ranks)]  # a heap of (tokens, sequences, rank)
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, count, rank = fewest[0]
        shards[rank].append(index)
        heapq.heapreplace(fewest, (tokens + lengths[index], count + 1, rank))
    return shards


def micro_batches(
    lengths: Sequence[int],
    batching: Batching,
    ranks: int = 1,
    length_multiple: int = 1,
    count_multiple: int = 1,
    together: int = 1,
) -> list[list[list[int]]]:
    """Plan of a training step: `[rank][micro-batch]` -> indices into `lengths`, longest first; deterministic.

    All ranks have the same number of micro-batches, a multiple of `count_multiple`. Packed ones have about equal token
    counts, and are as few as that allows. Padded ones hold sequences of similar length, and large ones are halved to
    reach the number. Where single sequences are left, empty ones are added at the end.

    Args:
        lengths: tokens of each sequence, prompt included.
        length_multiple: rows are padded to a multiple of this (the tensor-parallel size with sequence parallelism).
        count_multiple: for the interleaved pipeline schedule, the pipeline size.
        together: so many sequences that follow each other share a micro-batch, in their order.
    """
    if together > 1:
        parts = [lengths[first : first + together] for first in range(0, len(lengths), together)]
        as_one = [sum(part) if batching.packed else max(part) for part in parts]
        most = batching.max_tokens if batching.packed else batching.max_tokens // together
        plan = micro_batches(as_one, replace(batching, max_tokens=most), ranks, length_multiple, count_multiple)
        return [
            [[part * together + place for part in batch for place in range(together)] for batch in batches]
            for batches in plan
        ]
    shards = shard(lengths, ranks)
    if batching.packed:
        return _packed(lengths, shards, batching.max_tokens, length_multiple, count_multiple)
    plan = [_padded(lengths, indices, batching.max_tokens, length_multiple) for indices in shards]
    count = _rounded_up(max(len(batches) for batches in plan), count_multiple)
    for batches in plan:
        _spread(lengths, batches, count, length_multiple)
    return plan


def _packed(
    lengths: Sequence[int], shards: Sequence[Sequence[int]], budget: int, length_multiple: int, count_multiple: int
) -> list[list[list[int]]]:
    """The least number of micro-batches for which dealing out by falling length keeps each within the budget."""

    def fits(batch: Sequence[int]) -> bool:
        return len(batch) <= 1 or _rounded_up(sum(lengths[i] for i in batch), length_multiple) <= budget

    least = max(sum(min(lengths[i], budget) for i in indices) for indices in shards) // budget
    count = _rounded_up(max(least, min(len(lengths), 1)), count_multiple)
    while True:
        plan = [
            [[indices[i] for i in batch] for batch in shard([lengths[i] for i in indices], count)] for indices in shards
        ]
        if all(fits(batch) for batches in plan for batch in batches):
            return [sorted(batches, key=lambda batch: not batch) for batches in plan]
        count += count_multiple


def _padded(lengths: Sequence[int], indices: Sequence[int], budget: int, length_multiple: int) -> list[list[int]]:
    """Cut `indices`, longest first, into micro-batches within the budget."""
    batches: list[list[int]] = []
    start = 0
    while start < len(indices):
        rows = max(budget // _rounded_up(lengths[indices[start]], length_multiple), 1)
        batches.append(list(indices[start : start + rows]))
        start += rows
    return batches


def _spread(lengths: Sequence[int], batches: list[list[int]], count: int, length_multiple: int) -> None:
    """Extend `batches` to `count` micro-batches in place by halving the costliest one that has several rows."""
    while len(batches) < count:
        several = [number for number, batch in enumerate(batches) if len(batch) > 1]
        if not several:
            batches.append([])
            continue
        largest = max(
            several, key=lambda n: len(batches[n]) * _rounded_up(max(lengths[i] for i in batches[n]), length_multiple)
        )
        batch = batches[largest]
        middle = (len(batch) + 1) // 2
        batches[largest : largest + 1] = [batch[:middle], batch[middle:]]


def _rounded_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
