"""Token sequences in bounded memory, with an index of their n-grams: the compiled functions.

Tokens are kept in chunks, which are numbered in the order in which they were begun; a new chunk takes the place of the
oldest one. An id, number of a chunk * CHUNK + place in it, names one token of one sequence for good: once its chunk has
been replaced, the id is known to be stale.

For each order k, tokens whose k last tokens (themselves included) have the same hash form a chain, from the newest to
the oldest, as in the match finders of Lempel-Ziv compressors. A suffix of a sequence is looked up by following the
chains of its last token and comparing backwards.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhfspec_mega.compiled import compiled
from rlhfspec_mega.history.sizes import CHUNK

Ints = NDArray[np.int64]
Tokens = NDArray[np.int32]
Doubles = NDArray[np.float64]

ORDERS = (2, 4, 8)  # lengths of the n-grams that are looked up
NOTHING = -1  # in place of an id or of a chunk's number
LONGEST_MATCH = 24  # matches are compared this far
_STATE = (1 << 43) - 1  # bits of a hash state that are kept, so that its product below does not overflow
FOLLOWED = 64  # entries of a chain that are looked at: more of them are rarely better, and cost a cache miss each


class Store(NamedTuple):
    """The arrays; C counts chunks. They are few, since to pass one costs a compiled function several comparisons.

    Attributes:
        tokens: int32 [C * CHUNK].
        chunks: [C, 4] of the chunk that is kept in each place: its number, its tokens, and the numbers of the chunks
            before and behind it in the same sequence; NOTHING if there is none.
        heads: [orders, buckets] the newest id of each chain, or NOTHING.
        chains: [orders, C * CHUNK] the next older id of the same chain, or NOTHING.
        clock: [1] the number of the next chunk.
    """

    tokens: Tokens
    chunks: Ints
    heads: Ints
    chains: Ints
    clock: Ints


_NUMBER, _FILLED, _BEFORE, _BEHIND = range(4)


def empty_store(capacity: int) -> Store:
    """A store of at least `capacity` tokens. It takes 35 to 41 bytes for each of them."""
    chunks = max(-(-capacity // CHUNK), 2)
    buckets = 1 << (chunks * CHUNK // 2).bit_length() - 1
    return Store(
        np.zeros(chunks * CHUNK, np.int32),
        np.full((chunks, 4), NOTHING),
        np.full((len(ORDERS), buckets), NOTHING),
        np.full((len(ORDERS), chunks * CHUNK), NOTHING),
        np.zeros(1, np.int64),
    )


@compiled
def place_of(chunks: Ints, one: int) -> int:
    """Index of an id into the tokens; NOTHING if it is stale or no id."""
    if one < 0:
        return NOTHING
    number = one // CHUNK
    chunk = number % len(chunks)
    return chunk * CHUNK + one % CHUNK if chunks[chunk, _NUMBER] == number else NOTHING


@compiled
def follower(chunks: Ints, one: int) -> int:
    """The id behind a valid id in its sequence; NOTHING at the sequence's end."""
    chunk = one // CHUNK % len(chunks)
    inside = one % CHUNK + 1
    if inside < CHUNK:
        return one + 1 if inside < chunks[chunk, _FILLED] else NOTHING
    number = chunks[chunk, _BEHIND]
    return number * CHUNK if place_of(chunks, number * CHUNK) >= 0 else NOTHING


@compiled
def predecessor(chunks: Ints, one: int) -> int:
    """The id before a valid id in its sequence; NOTHING at its beginning, and where the store has forgotten it."""
    if one % CHUNK:
        return one - 1
    number = chunks[one // CHUNK % len(chunks), _BEFORE]
    return number * CHUNK + CHUNK - 1 if place_of(chunks, number * CHUNK) >= 0 else NOTHING


@compiled
def match_length(tokens: Tokens, chunks: Ints, one: int, other: int) -> int:
    """How many tokens two valid ids and their predecessors have in common, at most LONGEST_MATCH."""
    left, right = place_of(chunks, one), place_of(chunks, other)
    for length in range(LONGEST_MATCH):
        if tokens[left] != tokens[right]:
            return length
        # Places are next to each other within a chunk; only between two of them they have to be looked for.
        if left % CHUNK:
            left, one = left - 1, one - 1
        else:
            one = predecessor(chunks, one)
            left = place_of(chunks, one)
        if right % CHUNK:
            right, other = right - 1, other - 1
        else:
            other = predecessor(chunks, other)
            right = place_of(chunks, other)
        if left < 0 or right < 0:
            return length + 1
    return LONGEST_MATCH


@compiled
def _hashes(tokens: Tokens, chunks: Ints, last: int, mask: int, buckets: Ints) -> None:
    """Fill `buckets` [orders] with those of the n-grams that end at a valid id; NOTHING for those that are longer."""
    buckets[:] = NOTHING
    state, length = 0, 0
    for order in range(len(ORDERS)):
        while length < ORDERS[order]:
            if last < 0:
                return
            token = int(tokens[last // CHUNK % len(chunks) * CHUNK + last % CHUNK])
            state = (state * 1000003 + token + 1) & _STATE
            length += 1
            last = predecessor(chunks, last)
        buckets[order] = ((state ^ (state >> 23)) * 0x9E3779B1 >> 7) & mask


@compiled
def _new_chunk(store: Store, last: int) -> int:
    """Begin a chunk behind the id `last`, or without one before it; returns the id of its first token."""
    chunks = store.chunks
    number = store.clock[0]
    store.clock[0] = number + 1
    chunk = number % len(chunks)
    chunks[chunk] = number, 0, NOTHING, NOTHING
    if place_of(chunks, last) >= 0:  # with few chunks, the new one may just have replaced it
        chunks[chunk, _BEFORE] = last // CHUNK
        chunks[last // CHUNK % len(chunks), _BEHIND] = number
    return number * CHUNK


@compiled
def append(store: Store, last: int, token: int, buckets: Ints) -> int:
    """Add a token behind the id `last`, or begin a sequence where it is NOTHING or stale; returns the token's id.

    Args:
        buckets: [orders] a buffer.
    """
    tokens, chunks, heads, chains = store.tokens, store.chunks, store.heads, store.chains
    one = last + 1
    if one % CHUNK == 0 or place_of(chunks, last) < 0:
        one = _new_chunk(store, last)
    place = place_of(chunks, one)
    tokens[place] = token
    chunks[place // CHUNK, _FILLED] += 1
    _hashes(tokens, chunks, one, heads.shape[1] - 1, buckets)
    for order in range(len(ORDERS)):
        bucket = buckets[order]
        chains[order, place] = NOTHING
        if bucket >= 0:
            chains[order, place], heads[order, bucket] = heads[order, bucket], one
    return one


@compiled
def find_matches(store: Store, last: int, buckets: Ints, ids: Ints, lengths: Ints) -> int:
    """Find earlier tokens that end the same n-gram as a valid id, the longest n-grams first; returns how many.

    Args:
        buckets: [orders] a buffer.
        ids, lengths: [most] the result: the tokens, and how many tokens up to them are the same.
    """
    tokens, chunks, heads, chains = store.tokens, store.chunks, store.heads, store.chains
    _hashes(tokens, chunks, last, heads.shape[1] - 1, buckets)
    found, longer = 0, LONGEST_MATCH + 1
    for order in range(len(ORDERS) - 1, -1, -1):
        one = heads[order, buckets[order]] if buckets[order] >= 0 else NOTHING
        for _ in range(FOLLOWED):
            place = place_of(chunks, one)
            if place < 0 or found == len(ids):
                break
            if one != last and follower(chunks, one) >= 0:
                length = match_length(tokens, chunks, one, last)
                if ORDERS[order] <= length < longer:
                    ids[found], lengths[found] = one, length
                    found += 1
            one = chains[order, place]
        if buckets[order] >= 0:
            longer = ORDERS[order]
    return found
