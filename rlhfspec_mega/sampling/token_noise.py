"""The shared noise of single tokens: `sampling.noise` for compiled functions, which rank a handful of tokens each."""

from __future__ import annotations

import math

from rlhfspec_mega.compiled import compiled

_MASK = 0xFFFFFFFF


@compiled
def mixed_word(word: int) -> int:
    """A word of the hash's input, before it is absorbed."""
    word = word * 0xCC9E2D51 & _MASK
    return ((word << 15 | word >> 17) & _MASK) * 0x1B873593 & _MASK


@compiled
def absorbed(state: int, word: int) -> int:
    """The hash state after one more word."""
    state ^= mixed_word(word)
    return ((state << 13 | state >> 19) & _MASK) * 5 + 0xE6546B64 & _MASK


@compiled
def gumbel_of_token(state: int, position: int, token: int) -> float:
    """The noise of one token, up to rounding that of `sampling.noise.gumbel_from_states`.

    Args:
        state: hash state of the sample's seed, an int32 (`sampling.noise.seed_states`).
        position: index of the last input token.
    """
    h = absorbed(absorbed(state & _MASK, position & _MASK), token & _MASK) ^ 16
    h = (h ^ h >> 16) * 0x85EBCA6B & _MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & _MASK
    return gumbel_of_hash(h ^ h >> 16)


@compiled
def gumbel_of_hash(h: int) -> float:
    """The noise of a hash from 0 to 2^32 - 1."""
    return -math.log(-math.log((h + 0.5) * 2.0**-32))
