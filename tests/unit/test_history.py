"""Drafts from earlier text: the index against a search through all text, and trees against the rule written out."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfspec_mega.history.index import History
from rlhfspec_mega.history.propose import LENGTHS, WIDTH, Proposed
from rlhfspec_mega.history.sizes import BYTES, CHUNK, PROMPT_END, kept_tokens
from rlhfspec_mega.history.store import (
    LONGEST_MATCH,
    NOTHING,
    ORDERS,
    append,
    empty_store,
    find_matches,
    match_length,
    place_of,
    predecessor,
)
from rlhfspec_mega.planning.acceptance import GAPS, MATCH_CELLS, AcceptanceModel
from rlhfspec_mega.planning.cost import CostModel
from rlhfspec_mega.rollout.torch_engine.engine import TorchEngine
from rlhfspec_mega.sampling.noise import gumbel, seed_states
from rlhfspec_mega.sampling.token_noise import gumbel_of_token
from rlhfspec_mega.types import FinishedText, GenerationRequest
from tests.any_policy import any_policy
from tests.engine_samples import MAX_POSITIONS, SHAPE, send_weights

texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=70), min_size=1, max_size=8)


def stored(text: list[int], store: object, last: int) -> int:
    buckets = np.empty(len(ORDERS), np.int64)
    for token in text:
        last = append(store, last, token, buckets)
    return last


def stored_chunks(history: History) -> int:
    """Those so far, forgotten ones included."""
    return int(history.of_slots(0)[0].clock[0])


def common_suffix(left: list[int], right: list[int]) -> int:
    length = 0
    while length < min(len(left), len(right), LONGEST_MATCH) and left[-1 - length] == right[-1 - length]:
        length += 1
    return length


@given(texts, st.integers(2, 12))
@settings(max_examples=60, deadline=None)
def test_matches_are_as_long_as_the_text_that_is_left_says(sequences: list[list[int]], chunks: int) -> None:
    """Of all pairs of tokens, across chunks, and where the store has forgotten what came before."""
    store, prefixes = empty_store(chunks * CHUNK), list[tuple[int, list[int]]]()
    buckets = np.empty(len(ORDERS), np.int64)
    for text in sequences:
        last = NOTHING
        for place, token in enumerate(text):
            last = append(store, last, token, buckets)
            prefixes.append((last, text[: place + 1]))
    kept = []
    for one, prefix in prefixes[-120:]:
        if place_of(store.chunks, one) >= 0:
            left, at = [], one
            while at >= 0:
                left.append(at)
                at = predecessor(store.chunks, at)
            kept.append((one, prefix[len(prefix) - len(left) :]))
    for one, text in kept[::3]:
        for other, other_text in kept:
            assert match_length(store.tokens, store.chunks, one, other) == common_suffix(text, other_text)


def proposals(history: History, batch: int, **more: object) -> Proposed:
    wanted = {
        "noise": np.zeros(batch, np.int64),
        "lengths": np.full(batch, 10),
        "depths": np.full(batch, 8),
        "sampled": np.zeros(batch, np.bool_),
        "classes": np.zeros(batch, np.int64),
        "accepted": np.full((1, MATCH_CELLS), 0.9),
        "stops": np.zeros((batch, 300), np.bool_),
        "forced": np.zeros(batch, np.bool_),
    }
    return history.propose(batch, 16, 0.01, **(wanted | more))


@given(texts)
@settings(deadline=None)
def test_the_longest_matches_are_found(sequences: list[list[int]]) -> None:
    store, last = empty_store(8192), NOTHING
    for sequence in sequences:
        last = stored(sequence, store, NOTHING)
    ids, lengths = np.empty(2000, np.int64), np.empty(2000, np.int64)
    count = find_matches(store, last, np.empty(len(ORDERS), np.int64), ids, lengths)
    prefixes = [sequence[:end] for sequence in sequences for end in range(1, len(sequence))]
    expected = [length for one in prefixes if (length := common_suffix(one, sequences[-1])) >= ORDERS[0]]
    found = sorted(lengths[:count].tolist(), reverse=True)
    assert len(set(ids[:count].tolist())) == count, "no place twice"
    assert not Counter(found) - Counter(expected)
    assert found[:1] == sorted(expected, reverse=True)[:1], "the longest is among them"


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=300), min_size=1, max_size=12), st.integers(64, 256))
@settings(deadline=None, max_examples=50)
def test_memory_is_bounded_and_what_is_replaced_is_forgotten(sequences: list[list[int]], capacity: int) -> None:
    store = empty_store(capacity)
    size = sum(array.nbytes for array in store)
    for sequence in sequences:
        last = stored(sequence, store, NOTHING)
        kept = []
        while last >= 0:
            kept.append(int(store.tokens[place_of(store.chunks, last)]))
            last = predecessor(store.chunks, last)
        assert kept[::-1] == sequence[len(sequence) - len(kept) :], "the newest text is intact"
        assert len(kept) >= min(len(sequence), capacity - CHUNK)
    assert sum(array.nbytes for array in store) == size


def test_the_noise_is_that_of_the_samplers() -> None:
    seeds = torch.randint(0, 2**62, (50,), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(50) * 997
    expected, states = gumbel(seeds, positions, 3000), seed_states(seeds)
    for row, (state, position) in enumerate(zip(states.tolist(), positions.tolist(), strict=True)):
        for token in (0, 1, 2999):
            assert gumbel_of_token(state, position, token) == pytest.approx(float(expected[row, token]), rel=1e-9)


@pytest.mark.parametrize("sampled", [False, True])
def test_children_are_ranked_by_their_share_and_the_noise(sampled: bool) -> None:
    prompt, followers = [5, 6, 7, 8], [1, 1, 1, 2, 2, 3]
    history = History(8, 4096)
    for follower in followers:
        history.add([(prompt, [follower])])
    history.admit(0, prompt, [])
    state = int(seed_states(torch.tensor([77]))[0])
    found = proposals(history, 1, noise=np.array([state]), sampled=np.array([sampled]), depths=np.array([1]))
    unseen = 3 / (6 + 3)
    noise = {token: gumbel_of_token(state, 9, token) if sampled else 0.0 for token in (1, 2, 3)}
    scores = {token: math.log(count / 6 * (1 - unseen)) + noise[token] for token, count in Counter(followers).items()}
    best = sorted(scores, key=lambda token: -scores[token])
    assert dict(zip(found.tokens.tolist(), found.ranks.tolist(), strict=True)) == {t: i for i, t in enumerate(best)}
    gap = scores[best[0]] - max(scores[best[1]], math.log(unseen) + (np.euler_gamma if sampled else 0.0))
    bins = set(zip(found.cells // GAPS % LENGTHS, found.cells % GAPS, strict=True))
    edges = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.5, 7.0)
    assert bins == {(0, sum(edge < gap for edge in edges))}, "a match of four tokens"


def test_trees_follow_earlier_text_and_its_branches() -> None:
    history = History(4, 4096)
    history.add([([1, 2, 3], [10, 11, 12, 13, 258]), ([1, 2, 3], [10, 11, 20, 21, 258])])
    history.admit(0, [1, 2, 3], [])
    found = proposals(history, 1)
    paths = set()
    for node in range(len(found.rows)):
        path, at = [], node
        while at >= 0:
            path.append(int(found.tokens[at]))
            assert found.parents[at] < at and found.depths[at] == 1 + (
                found.depths[found.parents[at]] if found.parents[at] >= 0 else 0
            )
            at = int(found.parents[at])
        paths.add(tuple(reversed(path)))
    assert {(10,), (10, 11), (10, 11, 12), (10, 11, 20), (10, 11, 12, 13, 258), (10, 11, 20, 21, 258)} <= paths
    assert proposals(history, 1, depths=np.array([2])).depths.max() == 2


def test_a_token_that_ends_the_sample_is_not_proposed_nor_what_follows_it() -> None:
    history, stops = History(4, 4096), np.zeros((1, 300), np.bool_)
    history.admit(0, [1, 2, 3, 4, 50, 6, 7, 1, 2, 3, 4], [])
    stops[0, 50] = True
    assert len(proposals(history, 1, stops=stops).rows) == 0
    forced = proposals(history, 1, stops=stops, forced=np.ones(1, np.bool_))
    assert forced.tokens[:3].tolist() == [50, 6, 7]


@pytest.mark.parametrize("capacity", [1000, 1024, 65536, 100_000, 262_144])
def test_a_history_takes_as_many_bytes_as_are_planned(capacity: int) -> None:
    taken = sum(array.nbytes for array in empty_store(capacity))
    assert 30 * capacity < taken <= BYTES * (capacity + CHUNK)
    assert kept_tokens(capacity, 100) == max(capacity, 100 * 4 * CHUNK)


def test_samples_in_slots_read_each_other_and_move() -> None:
    history = History(3, 4096)
    history.admit(0, [4, 5, 6], [])
    history.admit(1, [4, 5, 6], [])
    history.extend([7, 8, 9, 7], np.array([3, 1]))
    found = proposals(history, 2)
    assert found.rows.tolist() == [1, 1] and found.tokens.tolist() == [8, 9]
    history.move(1, 0)
    assert proposals(history, 1).tokens.tolist() == [8, 9]


def test_a_prompt_is_stored_once_for_its_group() -> None:
    history, prompt = History(4, 4096), list(range(100))
    for slot in range(4):
        history.admit(slot, prompt, [])
    kept = sum(int(filled) for filled in history.of_slots(0)[0].chunks[:, 1] if filled > 0)
    assert kept == len(prompt) + 3 * PROMPT_END
    history.add([([50, 51, 52, 53], [])])
    history.admit(0, [50, 51, 52, 53], [])
    assert proposals(history, 1).tokens[:3].tolist() == [54, 55, 56], "a prompt's own text is proposed"


def test_random_text_never_breaks_it() -> None:
    draw = random.Random(0)
    history, lengths = History(8, 512), [0] * 8
    for _ in range(2000):
        if draw.random() < 0.1:
            slot = draw.randrange(8)
            history.admit(slot, [draw.randrange(3) for _ in range(draw.randrange(1, 40))], [])
        counts = np.array([draw.randrange(4) for _ in lengths])
        history.extend([draw.randrange(3) for _ in range(int(counts.sum()))], counts)
        found = proposals(history, 8, sampled=np.ones(8, np.bool_))
        assert (np.bincount(found.rows, minlength=8) <= 16).all() and (found.ranks < WIDTH).all()
        assert set(found.tokens.tolist()) <= {0, 1, 2}


def test_an_engine_remembers_what_others_decoded_but_nothing_twice() -> None:
    policy = any_policy("adaptive", AcceptanceModel(), CostModel())
    engine = TorchEngine(
        SHAPE,
        slots=2,
        max_positions=MAX_POSITIONS,
        prefill_chunk=8,
        dtype=torch.float32,
        device="cpu",
        policy=policy,
        history_tokens=4096,
    )
    send_weights(engine)
    engine.submit([GenerationRequest("own", "own", (1, 2, 3), 5, 8, 0.0)])
    while not engine.idle:
        engine.poll(0)
    history = engine.history
    assert history is not None
    before = stored_chunks(history)
    engine.remember([FinishedText("own", (1, 2, 3), [4] * 8)])
    assert stored_chunks(history) == before
    engine.remember([FinishedText("other", (7, 8), [9, 10, 11])])
    assert stored_chunks(history) == before + 1
    history.admit(0, [7, 8], [])
    assert proposals(history, 1).tokens.tolist() == [9, 10, 11]


def test_memory_stays_bounded_over_ten_million_tokens() -> None:
    history, draw = History(1, 65536), np.random.default_rng(0)
    size = sum(array.nbytes for array in history._store)
    history.admit(0, [1], [])
    for _ in range(10):
        history.extend(draw.integers(0, 50, 1_000_000).tolist(), np.array([1_000_000]))
    assert stored_chunks(history) * CHUNK > 10_000_000
    assert sum(array.nbytes for array in history._store) == size <= BYTES * 65536 + 8
    history.extend([7, 8, 9, 10, 11, 60, 61, 62, 7, 8, 9, 10, 11], np.array([13]))
    found = proposals(history, 1).tokens.tolist()
    assert found[0] == 60 and {61, 62} <= set(found)


@given(
    steps=st.lists(
        st.one_of(
            st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=3, max_size=3),  # tokens of each sample
            st.sampled_from(["admit", "move", "add", "propose"]),
        ),
        max_size=30,
    )
)
@settings(max_examples=60, deadline=None)
def test_steps_that_wait_are_stored_as_if_they_had_not(steps: list[list[list[int]] | str]) -> None:
    """Where samples come, move, end and are drafted for in between, the store is the same byte by byte."""
    waiting, at_once = History(3, 256), History(3, 256)
    for history in (waiting, at_once):
        for slot in range(3):
            history.admit(slot, (1, 2, slot), (3,))
    for number, step in enumerate(steps):
        for history in (waiting, at_once):
            if isinstance(step, list):
                batch = 1 + number % 3
                history.extend(
                    [token for sample in step[:batch] for token in sample], np.array([*map(len, step)][:batch])
                )
            elif step == "admit":
                history.admit(number % 3, (number % 4, 1), ())
            elif step == "move":
                history.move(2, number % 2)
            elif step == "add":
                texts = [((1, 2), (0, number % 4)), ((), ()), ((3,), [1] * (number % 40))]
                for some in [[text] for text in texts] if history is at_once else [texts]:
                    history.add(some)
            if step == "propose" or history is at_once:
                proposals(history, 3)
    for history in (waiting, at_once):
        proposals(history, 3)
    assert all(np.array_equal(one, other) for one, other in zip(waiting._store, at_once._store, strict=True))
    assert np.array_equal(waiting._last, at_once._last)
    waiting.extend([1, 1, 1], np.ones(3, np.int64))
    waiting.clear()
    assert not len(proposals(waiting, 3).rows) and stored_chunks(waiting) == 0
