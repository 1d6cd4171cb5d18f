"""Packing: which data-parallel rank trains which sequences, and in which micro-batches, under a token budget."""

from __future__ import annotations

from collections.abc import Sequence


def padded_length(lengths: Sequence[int], multiple: int) -> int:
    """Row length of a micro-batch of these sequences: the longest, rounded up to `multiple`."""
    return _rounded_up(max(lengths), multiple)


def shard(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of the sequences of each rank, longest first; token counts are balanced by giving the next longest
    sequence to the rank with the fewest tokens (LPT, Graham 1969)."""
    shards: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(ranks), key=lambda r: (tokens[r], len(shards[r]), r))
        shards[rank].append(index)
        tokens[rank] += lengths[index]
    return shards


def micro_batches(
    lengths: Sequence[int], budget: int, ranks: int = 1, length_multiple: int = 1, count_multiple: int = 1
) -> list[list[list[int]]]:
    """Plan of a training step: `[rank][micro-batch]` -> indices into `lengths`; deterministic.

    Sequences of similar length share a micro-batch, whose cost, rows times padded length, stays within the budget. A
    sequence that alone exceeds it gets a micro-batch of its own. All ranks have the same number of micro-batches, a
    multiple of `count_multiple`: large ones are halved to reach it, and where single sequences are left, empty ones
    (no rows) are added at the end.

    Args:
        lengths: tokens of each sequence, prompt included.
        budget: padded tokens in a micro-batch.
        length_multiple: rows are padded to a multiple of this (the tensor-parallel size with sequence parallelism).
        count_multiple: for the interleaved pipeline schedule, the pipeline size.
    """
    plan = [_fill(lengths, indices, budget, length_multiple) for indices in shard(lengths, ranks)]
    count = _rounded_up(max(len(batches) for batches in plan), count_multiple)
    for batches in plan:
        _spread(lengths, batches, count, length_multiple)
    return plan


def _fill(lengths: Sequence[int], indices: Sequence[int], budget: int, length_multiple: int) -> list[list[int]]:
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
            several, key=lambda n: len(batches[n]) * padded_length([lengths[i] for i in batches[n]], length_multiple)
        )
        batch = batches[largest]
        middle = (len(batch) + 1) // 2
        batches[largest : largest + 1] = [batch[:middle], batch[middle:]]


def _rounded_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
