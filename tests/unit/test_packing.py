"""Packing as properties: every sequence once, budget, equal counts, balance."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlhfspec_mega.rl.packing import Batching, micro_batches, shard


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), max_size=60),
    budget=st.integers(1, 700),
    ranks=st.integers(1, 4),
    length_multiple=st.sampled_from([1, 2, 8, 64]),
    count_multiple=st.integers(1, 4),
)
@example(lengths=[], budget=8, ranks=2, length_multiple=1, count_multiple=4)
@example(lengths=[5], budget=4, ranks=2, length_multiple=8, count_multiple=2)
def test_plan(lengths, budget, ranks, length_multiple, count_multiple):
    padded = Batching(budget, packed=False)
    plan = micro_batches(lengths, padded, ranks, length_multiple, count_multiple)
    assert plan == micro_batches(list(lengths), padded, ranks, length_multiple, count_multiple)
    assert sorted(i for batches in plan for batch in batches for i in batch) == list(range(len(lengths)))
    assert len(plan) == ranks
    counts = {len(batches) for batches in plan}
    assert len(counts) == 1 and counts.pop() % count_multiple == 0
    for batches in plan:
        for batch in batches:
            if len(batch) > 1:
                longest = max(lengths[i] for i in batch)
                padded = next(n for n in range(longest, longest + length_multiple) if n % length_multiple == 0)
                assert len(batch) * padded <= budget
        flat = [lengths[i] for batch in batches for i in batch]
        assert flat == sorted(flat, reverse=True)  # neighbours in length share micro-batches
        if any(not batch for batch in batches):
            assert all(len(batch) <= 1 for batch in batches)  # empty only where nothing is left to halve
            assert batches == sorted(batches, key=lambda batch: not batch)


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), max_size=60),
    budget=st.integers(1, 700),
    ranks=st.integers(1, 4),
    length_multiple=st.sampled_from([1, 2, 8]),
    count_multiple=st.integers(1, 4),
)
@example(lengths=[], budget=8, ranks=2, length_multiple=1, count_multiple=4)
def test_packed_plan(lengths, budget, ranks, length_multiple, count_multiple):
    plan = micro_batches(lengths, Batching(budget), ranks, length_multiple, count_multiple)
    assert sorted(i for batches in plan for batch in batches for i in batch) == list(range(len(lengths)))
    (count,) = {len(batches) for batches in plan}
    assert count % count_multiple == 0
    for batches in plan:
        tokens = [sum(lengths[i] for i in batch) for batch in batches]
        for batch, total in zip(batches, tokens, strict=True):
            assert len(batch) <= 1 or -(-total // length_multiple) * length_multiple <= budget
            assert [lengths[i] for i in batch] == sorted((lengths[i] for i in batch), reverse=True)
        if len(tokens) > 1:
            assert max(tokens) - min(tokens) <= max(lengths)  # equal within one sequence
        assert batches == sorted(batches, key=lambda batch: not batch)
        if batches and not batches[-1]:
            assert all(len(batch) <= 1 for batch in batches)


@given(
    lengths=st.lists(st.integers(1, 30), max_size=20),
    budget=st.integers(1, 100),
    ranks=st.integers(1, 3),
    packed=st.booleans(),
)
def test_pairs_stay_together(lengths, budget, ranks, packed):
    lengths = lengths[: len(lengths) // 2 * 2]
    plan = micro_batches(lengths, Batching(budget, packed), ranks, together=2)
    batches = [batch for of_rank in plan for batch in of_rank]
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert batch == [i for first in batch[::2] for i in (first, first + 1)] and all(i % 2 == 0 for i in batch[::2])
        tokens = [lengths[i] for i in batch]
        assert len(batch) <= 2 or (sum(tokens) if packed else len(tokens) * max(tokens)) <= budget


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=60), ranks=st.integers(1, 5))
def test_ranks_are_balanced_within_one_sequence(lengths, ranks):
    tokens = [sum(lengths[i] for i in indices) for indices in shard(lengths, ranks)]
    assert sum(tokens) == sum(lengths)
    assert max(tokens) - min(tokens) <= max(lengths)


def test_a_plan_by_hand():
    lengths = [10, 3, 30, 4, 9, 2]
    assert micro_batches(lengths, Batching(24, packed=False), length_multiple=4) == [[[2], [0, 4], [3, 1, 5]]]
    assert micro_batches(lengths, Batching(24), length_multiple=4) == [[[2], [0, 1, 5], [4, 3]]]


def test_micro_batches_are_halved_before_empty_ones_are_added():
    for batching in (Batching(16, packed=False), Batching(16)):
        assert [sorted(map(sorted, micro_batches([4] * 4, batching, count_multiple=2)[0]))] in (
            [[[0, 1], [2, 3]]],
            [[[0, 2], [1, 3]]],
        )
        assert micro_batches([4] * 3, batching, count_multiple=4) == [[[0], [1], [2], []]]
    assert micro_batches([9, 1], Batching(4), ranks=2) == [[[0]], [[1]]]
