"""The best tokens under shared noise on a CPU: the choice of `sampling.select`, without the noise of every token.

A token's noise is -log(-log u), which costs a hundred times as much as the hash that u is made of. The upper bits of
the hash bound it from above. So few tokens can have the best score, and only theirs is computed, in float64.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhfspec_mega.compiled import compiled, vectorized
from rlhfspec_mega.exponential import exponential
from rlhfspec_mega.sampling.float_order import in_order, of_order
from rlhfspec_mega.sampling.token_noise import absorbed, gumbel_of_hash, mixed_word

Singles = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]
Keys = NDArray[np.int32]
Words = NDArray[np.uint32]
Bools = NDArray[np.bool_]

_BITS = 10  # upper bits of a hash, by which its noise is bounded
_SHIFT = np.uint32(32 - _BITS)
_BLOCK = 1024  # exponentials that are added up in float32
_LOOK = 64  # tokens that are looked at together for one that may be the best
_MASK = 0xFFFFFFFF


class NextTokens(NamedTuple):
    """What the choice of the next tokens depends on besides logits, by slot.

    Attributes:
        states: hash state of the sample's seed, an int32 (`noise.seed_states`).
        lengths: tokens of prompt and response so far.
        temperatures: 0 is greedy.
        stops: [slots, vocabulary] tokens that may not be chosen where `forced`.
    """

    states: Ints
    lengths: Ints
    temperatures: Doubles
    stops: Bools
    forced: Bools


class _Noise(NamedTuple):
    """Words of the tokens, as they enter the hash, and the most noise by the upper bits of the hash."""

    words: Words
    most: Singles


class _Scratch(NamedTuple):
    """Arrays [vocabulary] of one row: logits / T, hashes, and `in_order` of the most that a score can be."""

    scaled: Singles
    hashes: Words
    most: Keys


class Chosen(NamedTuple):
    """Tokens [n], and log_softmax(logits / T) [n] of each, with T = 1 where it is 0."""

    tokens: Ints
    logprobs: Singles


class Best(NamedTuple):
    """The best tokens of each of n rows of logits, best first.

    Attributes:
        columns: [n, count], all different; those of a score of -inf, or that is no number, are any.
        scores: [n, count] their `select.perturbed_scores`.
    """

    columns: Ints
    scores: Doubles


def choose_tokens(logits: Singles, slots: NextTokens, rows: Ints, depths: Ints) -> Chosen:
    """The best token of each row of logits, as `select.select_tokens`; arguments as `best_tokens`."""
    tokens, logprobs = best_tokens(logits, slots, rows, depths, 1).columns[:, 0], np.empty(len(logits), np.float32)
    _fill_logprobs(logits, slots.temperatures, rows, tokens, logprobs)
    return Chosen(tokens, logprobs)


def best_tokens(
    logits: Singles, slots: NextTokens, rows: Ints, depths: Ints, count: int, token_ids: Ints | None = None
) -> Best:
    """The `count` best columns of each row of logits; of equal ones the first comes first.

    Args:
        logits: [n, V].
        rows, depths: [n] slots, and how many tokens after the sample's last one the node stands whose logits they are.
        count: at most V.
        token_ids: [V] the target's token ids of the columns, if they are not 0 .. V - 1.
    """
    columns, scores = np.empty((len(logits), count), np.int64), np.empty((len(logits), count))
    words = _words(slots.stops.shape[1])
    ids = np.arange(logits.shape[1]) if token_ids is None else token_ids
    noise = _Noise(words if token_ids is None else words[token_ids], _most_noise())
    _fill_best(logits, slots, rows, depths, ids, noise, columns, scores)
    return Best(columns, scores)


@lru_cache(maxsize=8)
def _words(size: int) -> Words:
    """Words of token ids 0 .. size - 1, mixed and rotated."""
    words = np.empty(size, np.uint32)
    _fill_words(words)
    return words


@compiled
def _fill_words(words: Words) -> None:
    for token in range(len(words)):
        word = mixed_word(token)
        words[token] = (word << 13 | word >> 19) & _MASK


@lru_cache(maxsize=1)
def _most_noise() -> Singles:
    """The most noise of hashes with the same upper bits, rounded up."""
    last = (np.arange(2**_BITS, dtype=np.int64) + 1 << int(_SHIFT)) - 1
    most = np.array([gumbel_of_hash(int(h)) for h in last], np.float32)
    return np.nextafter(most, np.float32(np.inf))


@compiled
def _fill_best(
    logits: Singles,
    slots: NextTokens,
    rows: Ints,
    depths: Ints,
    ids: Ints,
    noise: _Noise,
    columns: Ints,
    scores: Doubles,
) -> None:
    """Fill in columns and scores; see `best_tokens`."""
    vocabulary = logits.shape[1]
    scratch = _Scratch(
        np.empty(vocabulary, np.float32), np.empty(vocabulary, np.uint32), np.empty(vocabulary, np.int32)
    )
    for one in range(len(logits)):
        row, scaled = rows[one], scratch.scaled
        temperature = np.float32(slots.temperatures[row])
        sampled = bool(temperature > 0)
        _scale(logits[one], temperature if sampled else np.float32(1.0), scaled)
        if slots.forced[row]:
            for column in range(vocabulary):
                if slots.stops[row, ids[column]]:
                    scaled[column] = -np.inf
        if sampled:
            prefix = absorbed(slots.states[row] & _MASK, (slots.lengths[row] - 1 + depths[one]) & _MASK)
            _hash(np.uint32((prefix << 13 | prefix >> 19) & _MASK), noise.words, scratch.hashes)
            _bound(scaled, scratch.hashes, noise.most, scratch.most)
        else:
            for column in range(vocabulary):
                scratch.most[column] = in_order(scaled[column])
        _take_best(scratch, sampled, columns[one], scores[one])


@vectorized
def _fill_logprobs(logits: Singles, temperatures: Doubles, rows: Ints, tokens: Ints, logprobs: Singles) -> None:
    """Fill in log_softmax(logits / T) of the tokens."""
    vocabulary = logits.shape[1]
    for one in range(len(logits)):
        temperature = np.float32(temperatures[rows[one]])
        if not temperature > 0:
            temperature = np.float32(1.0)
        largest = np.int32(-(2**31))
        for column in range(vocabulary):
            largest = max(largest, in_order(logits[one, column] / temperature))
        best = of_order(largest)
        total: Any = 0.0
        for first in range(0, vocabulary, _BLOCK):
            some = np.float32(0.0)
            for column in range(first, min(first + _BLOCK, vocabulary)):
                some += exponential(logits[one, column] / temperature - best)
            total += some
        logprobs[one] = logits[one, tokens[one]] / temperature - best - math.log(total)


@vectorized
def _scale(logits: Singles, temperature: np.float32, scaled: Singles) -> None:
    """Fill in logits / T."""
    for column in range(len(logits)):
        scaled[column] = logits[column] / temperature


@vectorized
def _hash(prefix: np.uint32, words: Words, hashes: Words) -> None:
    """Fill in the hashes of all tokens."""
    for column in range(len(hashes)):
        h = np.uint32(np.uint32((prefix ^ words[column]) * np.uint32(5)) + np.uint32(0xE6546B64)) ^ np.uint32(16)
        h = np.uint32((h ^ h >> np.uint32(16)) * np.uint32(0x85EBCA6B))
        h = np.uint32((h ^ h >> np.uint32(13)) * np.uint32(0xC2B2AE35))
        hashes[column] = h ^ h >> np.uint32(16)


@vectorized
def _bound(scaled: Singles, hashes: Words, noise: Singles, most: Keys) -> None:
    """Fill in what the scores are at most, rounded to float32."""
    for column in range(len(scaled)):
        most[column] = in_order(scaled[column] + noise[hashes[column] >> _SHIFT])


@compiled
def _take_best(scratch: _Scratch, sampled: bool, columns: Ints, scores: Doubles) -> None:
    """Fill in the best columns and their scores; places for which there are no scores get other columns."""
    columns[:], scores[:] = -1, -np.inf
    bar = in_order(np.float32(-np.inf))
    for first in range(0, len(scratch.most), _LOOK):
        some = scratch.most[first : first + _LOOK]
        if _largest(some) < bar:
            continue
        for column in range(first, first + len(some)):
            # Rounding to float32 keeps the order: what reaches the last score in float64 reaches the bar.
            if scratch.most[column] >= bar:
                noise = gumbel_of_hash(scratch.hashes[column]) if sampled else 0.0
                _insert(scratch.scaled[column] + noise, column, columns, scores)
                bar = in_order(np.float32(scores[len(scores) - 1]))
    unused = 0
    for place in range(len(columns)):
        if columns[place] < 0:
            while (columns == unused).any():
                unused += 1
            columns[place] = unused


@compiled
def _largest(keys: Keys) -> np.int32:
    largest = np.int32(-(2**31))
    for key in keys:
        largest = max(largest, key)
    return largest


@compiled
def _insert(score: float, column: int, columns: Ints, scores: Doubles) -> None:
    """Put a column in its place among the best ones; of equal ones the first comes first."""
    place = len(scores)
    while place and scores[place - 1] < score:
        place -= 1
    if place == len(scores):
        return
    for behind in range(len(scores) - 1, place, -1):
        scores[behind], columns[behind] = scores[behind - 1], columns[behind - 1]
    scores[place], columns[place] = score, column
