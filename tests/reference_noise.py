"""The shared noise written again in plain Python, byte for byte as published: MurmurHash3 x86_32 and splitmix64."""

import math
import struct

MASK32 = (1 << 32) - 1
MASK64 = (1 << 64) - 1


def rotl(x: int, bits: int) -> int:
    return ((x << bits) | (x >> (32 - bits))) & MASK32


def fmix(h: int) -> int:
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & MASK32
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & MASK32
    return h ^ (h >> 16)


def murmur3(data: bytes, seed: int) -> int:
    """MurmurHash3 x86_32 of data whose length is a multiple of 4."""
    h = seed
    for (k,) in struct.iter_unpack("<I", data):
        k = (k * 0xCC9E2D51) & MASK32
        k = (rotl(k, 15) * 0x1B873593) & MASK32
        h = (rotl(h ^ k, 13) * 5 + 0xE6546B64) & MASK32
    return fmix(h ^ len(data))


def splitmix64_next(state: int) -> int:
    """First output of a splitmix64 generator in this state."""
    z = (state + 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def gumbel(seed: int, position: int, token: int) -> float:
    h = murmur3(struct.pack("<IIII", seed & MASK32, seed >> 32, position, token), 0)
    return -math.log(-math.log((h + 0.5) / 2**32))
