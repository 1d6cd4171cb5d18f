"""Shared noise against MurmurHash3 and splitmix64 in plain Python, and its statistics."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfspec_mega.sampling.noise import gumbel, gumbel_from_states, sample_seed, seed_states
from rlhfspec_mega.sampling.select import select_tokens
from tests import reference_noise as reference

SEEDS = st.integers(0, 2**63 - 1)
GOLDEN_SEED_0 = 1195769770526638388
GOLDEN_SEED_1 = 5871182137338286273
GOLDEN_NOISE = [
    [0.38013756332654974, -1.8016876475570605, 0.2545424136510397],
    [-0.5634821610563001, -0.8197621461462112, 1.2632191671646555],
]
POSITIONS = st.integers(0, 2**31 - 1)


def test_the_reference_has_the_published_hashes():
    assert reference.murmur3(b"", 1) == 0x514E28B7
    assert reference.murmur3(b"test", 0) == 0xBA6BD213
    assert reference.murmur3(b"test", 0x9747B28C) == 0x704B81DC
    assert reference.splitmix64_next(0) == 0xE220A8397B1DCDAF


def test_golden_vectors():
    assert sample_seed(0, 0, 0, 0) == GOLDEN_SEED_0
    assert sample_seed(1234, 7, 99, 3) == GOLDEN_SEED_1
    noise = gumbel(torch.tensor([0, GOLDEN_SEED_1]), torch.tensor([0, 4095]), torch.tensor([0, 1, 128_255]))
    assert noise.dtype == torch.float64
    assert noise.tolist() == [pytest.approx(row, rel=1e-14) for row in GOLDEN_NOISE]


@settings(deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=4, max_size=4))
def test_seed_is_chained_splitmix64(words):
    state = 0
    for word in words:
        state = reference.splitmix64_next(state ^ (word & reference.MASK64))
    assert sample_seed(*words) == state >> 1 < 2**63


def test_neighbouring_samples_have_different_seeds():
    seeds = {sample_seed(r, s, p, m) for r in range(3) for s in range(5) for p in range(10) for m in range(10)}
    assert len(seeds) == 1500


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(SEEDS, POSITIONS), min_size=1, max_size=4), st.lists(POSITIONS, min_size=1, max_size=5))
def test_noise_is_the_hash(rows, tokens):
    seeds, positions = (torch.tensor(column) for column in zip(*rows, strict=True))
    expected = [[reference.gumbel(seed, t, token) for token in tokens] for seed, t in rows]
    actual = gumbel(seeds, positions, torch.tensor(tokens))
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=1e-13)


def test_vocabulary_size_means_all_ids_and_shapes_broadcast():
    seeds, positions = torch.tensor([5, 2**62 + 9]), torch.arange(6).view(2, 3)
    full = gumbel_from_states(seed_states(seeds)[:, None], positions, 300)
    ids = torch.tensor([299, 0, 17])
    assert full.shape == (2, 3, 300)
    for row in range(2):
        for column in range(3):
            one = gumbel(seeds[row : row + 1], positions[row, column : column + 1], ids)
            assert torch.equal(full[row, column, ids], one[0])


@pytest.mark.parametrize("hashed", [0, reference.MASK32])
def test_noise_is_finite_at_the_ends_of_the_hash(hashed):
    """The token word that hashes to 0 or 2^32 - 1, found by running the hash backwards."""
    seed, position = sample_seed(0, 1, 2, 3), 77
    token = token_with_hash(seed, position, hashed)
    assert reference.murmur3(struct.pack("<IIII", seed & reference.MASK32, seed >> 32, position, token), 0) == hashed
    signed = token - (1 << 32) if token >> 31 else token
    noise = gumbel(torch.tensor([seed]), torch.tensor([position]), torch.tensor([signed])).item()
    assert math.isfinite(noise)
    assert noise == pytest.approx(-math.log(-math.log((hashed + 0.5) / 2**32)), rel=1e-12)


def token_with_hash(seed: int, position: int, hashed: int) -> int:
    """Invert MurmurHash3's last block and finaliser: every step is a bijection of 32-bit words."""

    def inverse(factor: int) -> int:
        return pow(factor, -1, 1 << 32)

    def unshift(h: int, bits: int) -> int:
        out = h
        for _ in range(32 // bits + 1):
            out = h ^ (out >> bits)
        return out

    h = unshift(hashed, 16) * inverse(0xC2B2AE35) & reference.MASK32
    h = unshift(h, 13) * inverse(0x85EBCA6B) & reference.MASK32
    h = unshift(h, 16) ^ 16
    h = reference.rotl((h - 0xE6546B64) * inverse(5) & reference.MASK32, 19)
    prefix = 0
    for word in (seed & reference.MASK32, seed >> 32, position):
        mixed = reference.rotl(word * 0xCC9E2D51 & reference.MASK32, 15) * 0x1B873593 & reference.MASK32
        prefix = (reference.rotl(prefix ^ mixed, 13) * 5 + 0xE6546B64) & reference.MASK32
    mixed = (h ^ prefix) * inverse(0x1B873593) & reference.MASK32
    return reference.rotl(mixed, 17) * inverse(0xCC9E2D51) & reference.MASK32


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_uniformity():
    seeds = torch.tensor([sample_seed(0, 0, index, 0) for index in range(200)])
    u = torch.exp(-torch.exp(-gumbel(seeds, torch.arange(200) % 7, 1000)))
    counts = torch.histc(u, bins=64, min=0.0, max=1.0)
    assert u.min() > 0 and u.max() < 1
    assert chi_square(counts, torch.full((64,), 1 / 64, dtype=torch.float64)) < 136  # 63 degrees, p = 2e-7


LOGITS = torch.tensor([3.0, 2.5, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0, 0.0, -0.5, -0.5, -1.0, -1.0, -1.5, -2.0, -2.0])


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
@pytest.mark.parametrize("varying", ["position", "member"])
def test_sampled_frequencies_equal_softmax(temperature, varying):
    draws = 50_000
    seeds = torch.tensor([sample_seed(1, 2, 3, m if varying == "member" else 0) for m in range(draws)])
    positions = torch.arange(draws) if varying == "position" else torch.full((draws,), 11)
    temperatures = torch.full((draws,), temperature)
    chosen = select_tokens(LOGITS.expand(draws, -1), temperatures, gumbel(seeds, positions, 16))
    counts = torch.bincount(chosen.tokens, minlength=16).double()
    assert chi_square(counts, (LOGITS.double() / temperature).softmax(-1)) < 55  # 15 degrees, p = 2e-6


def test_neighbouring_positions_are_independent():
    draws = 40_000
    seeds = torch.tensor([sample_seed(9, 0, 0, 0)]).expand(draws)
    tokens = gumbel(seeds, torch.arange(draws), 4).argmax(-1)
    pairs = torch.bincount(tokens[::2] * 4 + tokens[1::2], minlength=16).double()
    assert chi_square(pairs, torch.full((16,), 1 / 16, dtype=torch.float64)) < 55


def test_rows_choose_by_their_own_temperature_and_bans():
    logits = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    temperatures = torch.tensor([0.0, 1.0, 0.5])
    noise = gumbel(torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6]), 16)
    free = select_tokens(logits, temperatures, noise)
    divisors = torch.tensor([[1.0], [1.0], [0.5]])
    expected = [logits[0].argmax(), (logits[1] + noise[1]).argmax(), (logits[2] / 0.5 + noise[2]).argmax()]
    assert free.tokens.tolist() == [int(token) for token in expected]
    logprobs = (logits.double() / divisors).log_softmax(-1)
    torch.testing.assert_close(free.logprobs.double(), logprobs[range(3), free.tokens], rtol=0, atol=1e-6)

    banned = torch.zeros(3, 16, dtype=torch.bool)
    banned[range(3), free.tokens] = True
    second = select_tokens(logits, temperatures, noise, banned)
    assert not (second.tokens == free.tokens).any()
    torch.testing.assert_close(second.logprobs.double(), logprobs[range(3), second.tokens], rtol=0, atol=1e-6)
