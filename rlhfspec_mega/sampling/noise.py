"""Shared noise: a Gumbel vector that depends only on a sample's seed and the position, never on the engine.

seed = splitmix64 chained over (run seed, step, prompt index, member of the group), cut to 63 bits.
h    = MurmurHash3 x86 32-bit (Appleby, public domain), hash seed `HASH_SEED`, over the four little-endian words
       (seed low, seed high, t, token id); t = index of the last input token, that is of the token whose logits are
       sampled: prompt length - 1 for the first response token.
u    = (h + 0.5) / 2^32, strictly inside (0, 1);  g = -log(-log u) in float64.

The hash runs on int32 tensors, whose products and left shifts wrap modulo 2^32 like uint32; right shifts are masked.
All but the last word is hashed per sample; only the token's word and the finaliser touch samples x vocabulary.
"""

from __future__ import annotations

from functools import lru_cache

import torch

HASH_SEED = 0
_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_HASHED_BYTES = 16  # four words


def sample_seed(run_seed: int, step: int, prompt_index: int, member: int) -> int:
    """Seed in [0, 2^63) of one sample's noise: splitmix64 (Steele et al. 2014) chained over the four numbers."""
    state = 0
    for word in (run_seed, step, prompt_index, member):
        state = _splitmix64(state ^ (word & _MASK64))
    return state >> 1


def seed_states(seeds: torch.Tensor) -> torch.Tensor:
    """Hash states after the two seed words: int64 seeds [...] -> int32 [...]. Constant over a sample's life."""
    state = torch.full_like(seeds, HASH_SEED, dtype=torch.int32)
    for word in (seeds, seeds >> 32):
        state = _absorb(state, _mix_word(_low_word(word)))
    return state


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, tokens: int | torch.Tensor) -> torch.Tensor:
    """Gumbel noise float64 [..., V] for int64 `seeds` and `positions` of broadcastable shapes [...], e.g. both [B].

    `tokens` is the vocabulary size V (token ids 0..V-1) or int64 token ids [V] for a reduced vocabulary.
    """
    return gumbel_from_states(seed_states(seeds), positions, tokens)


def gumbel_from_states(states: torch.Tensor, positions: torch.Tensor, tokens: int | torch.Tensor) -> torch.Tensor:
    """As `gumbel`, from `seed_states` computed once per sample."""
    if isinstance(tokens, int):
        words = _vocabulary_words(tokens, states.device)
    else:
        words = _rotate_left(_mix_word(tokens.to(torch.int32)), 13)
    prefix = _absorb(states, _mix_word(positions.to(torch.int32)))
    # rotl(prefix ^ word) = rotl(prefix) ^ rotl(word): both rotations stay outside [..., V].
    h = _rotate_left(prefix, 13).unsqueeze(-1) ^ words
    h.mul_(5).add_(_signed(0xE6546B64)).bitwise_xor_(_HASHED_BYTES)
    _xor_shift_(h, 16).mul_(_signed(0x85EBCA6B))
    _xor_shift_(h, 13).mul_(_signed(0xC2B2AE35))
    _xor_shift_(h, 16)
    # Flipping the top bit turns the uint32 h into the int32 h - 2^31; the sum below is exact in float64.
    u = h.bitwise_xor_(_signed(0x80000000)).double().add_(2.0**31 + 0.5).mul_(2.0**-32)
    return u.log_().neg_().log_().neg_()


def _splitmix64(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _signed(word: int) -> int:
    """The int32 with the bits of this uint32."""
    return word - (1 << 32) if word & 0x80000000 else word


def _low_word(values: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of int64 values as int32."""
    return (((values & _MASK32) ^ 0x80000000) - 0x80000000).to(torch.int32)


def _rotate_left(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x << bits) | ((x >> (32 - bits)) & ((1 << bits) - 1))


def _mix_word(word: torch.Tensor) -> torch.Tensor:
    return _rotate_left(word * _signed(0xCC9E2D51), 15) * 0x1B873593


def _absorb(state: torch.Tensor, mixed_word: torch.Tensor) -> torch.Tensor:
    return _rotate_left(state ^ mixed_word, 13) * 5 + _signed(0xE6546B64)


def _xor_shift_(h: torch.Tensor, bits: int) -> torch.Tensor:
    return h.bitwise_xor_((h >> bits).bitwise_and_((1 << (32 - bits)) - 1))


@lru_cache(maxsize=8)
def _vocabulary_words(size: int, device: torch.device) -> torch.Tensor:
    """Mixed and rotated words of token ids 0..size-1: int32 [size]."""
    with torch.inference_mode(False):  # cached beyond the caller's mode
        return _rotate_left(_mix_word(torch.arange(size, dtype=torch.int32, device=device)), 13)
