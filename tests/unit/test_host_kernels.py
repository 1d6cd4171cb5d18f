"""Compiled loops of a decode step against torch."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlhfspec_mega.exponential import exponential
from rlhfspec_mega.models import host_cpu
from rlhfspec_mega.models.host_floats import HOST_DTYPES, host_array, load, store
from rlhfspec_mega.models.host_kernels import rms_norm, suits_host_kernels
from rlhfspec_mega.models.rope import Rotary
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.tree import ROOT, DraftTree
from rlhfspec_mega.rollout.torch_engine import cache as cache_module
from rlhfspec_mega.rollout.torch_engine.cache import CachedAttention, Inputs, KVCache
from rlhfspec_mega.rollout.torch_engine.host_attention import (
    LIMITS,
    LIMITS_WITH_MKL,
    HostAttention,
    step_attention,
)
from rlhfspec_mega.rollout.torch_engine.slots import SlotState
from rlhfspec_mega.rollout.torch_engine.step_noise import DeviceNoise, step_noise
from rlhfspec_mega.rollout.torch_engine.verification import Verification, accept, with_drafts
from rlhfspec_mega.sampling.float_order import in_order, of_order
from rlhfspec_mega.sampling.host_select import best_tokens, choose_tokens
from rlhfspec_mega.sampling.noise import gumbel, seed_states
from rlhfspec_mega.sampling.select import perturbed_scores, scaled_logits, select_tokens
from tests.unit.test_torch_engine import one_thread

__all__ = ["one_thread"]
PLACES = 40


def number_in_row(rows: np.ndarray) -> np.ndarray:
    """The number of each entry within its row, from 0; `rows` is sorted."""
    return np.arange(len(rows)) - np.searchsorted(rows, rows)


def shape_of(heads: int, kv_heads: int, head_dim: int) -> ModelShape:
    return ModelShape("llama", 32, 2, heads, kv_heads, head_dim, 48, 29, 64, 1e4, 1e-6, True)


def test_exponential_is_accurate() -> None:
    values = np.concatenate((np.linspace(-87, 0, 4001), [-1e-8, -0.34657, -0.34658])).astype(np.float32)
    expected = np.exp(values.astype(np.float64))
    found = np.array([exponential(value) for value in values], np.float64)
    assert np.abs(found / expected - 1.0).max() < 3e-7
    assert exponential(np.float32(0.0)) == 1.0
    assert 0.0 < exponential(np.float32(-500.0)) < 2e-38 and 0.0 < exponential(np.float32(-np.inf)) < 2e-38
    assert np.isnan(exponential(np.float32(np.nan)))


def rounded(exact: torch.Tensor, dtype: torch.dtype) -> dict[str, float]:
    """What a result may differ by from the exact one: half of the last place in bfloat16."""
    return {"rtol": 2**-8 + 1e-5 if dtype == torch.bfloat16 else 1e-5, "atol": 1e-6}


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=9))
@example([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 1])
def test_bfloat16_is_read_and_rounded_as_in_torch(words: list[int]) -> None:
    """All float32 values: halves go to the even neighbour, the largest ones to infinity, and NaN stays NaN."""
    numbers = np.array(words, np.uint32).view(np.float32)
    halves = torch.zeros(len(words), dtype=torch.bfloat16)
    store(host_array(halves), numbers)
    expected = torch.from_numpy(numbers.copy()).bfloat16()
    assert torch.allclose(halves, expected, rtol=0.0, atol=0.0, equal_nan=True)
    widened = torch.tensor([float(load(host_array(halves), place)) for place in range(len(words))])
    assert torch.allclose(widened, expected.float(), rtol=0.0, atol=0.0, equal_nan=True)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=2))
@example([-float("inf"), float("inf")])
@example([-1e-45, 0.0])
def test_whole_numbers_are_in_the_order_of_floats(pair: list[float]) -> None:
    first, second = map(np.float32, pair)
    assert (in_order(first) < in_order(second)) == (first < second) or first == second == 0.0
    assert of_order(in_order(first)) == first


@pytest.mark.parametrize("dtype", HOST_DTYPES)
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("hidden", [1, 30, 128])
def test_rms_norm_is_torchs(rows: int, hidden: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, hidden).to(dtype), torch.randn(hidden).to(dtype)
    expected = F.rms_norm(x.double(), (hidden,), weight.double(), 0.1)
    assert torch.allclose(rms_norm(x, weight, 0.1).double(), expected, **rounded(expected, dtype))


@pytest.mark.parametrize("dtype", HOST_DTYPES)
def test_the_rotation_on_the_host_is_torchs(dtype: torch.dtype) -> None:
    shape = shape_of(4, 2, 12)
    on_host = Rotary(shape, 64, dtype, "cpu")
    positions, qkv = torch.tensor([0, 5, 63]), torch.randn(3, 8, 12).to(dtype)
    exact, other = qkv.double(), Rotary(shape, 64, torch.float64, "cpu")
    other._cos, other._sin = on_host._cos.double(), on_host._sin.double()  # as rounded
    other.at(positions)(exact, heads=6)
    on_host.at(positions)(qkv, heads=6)
    assert torch.allclose(qkv.double(), exact, **rounded(exact, dtype))
    assert suits_host_kernels(torch.zeros(1)) and not suits_host_kernels(torch.zeros(1, dtype=torch.float64))


@given(
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1), (3, 3)]),
    head_dim=st.sampled_from([2, 12, 16]),
    seed=st.integers(0, 99),
    dtype=st.sampled_from(HOST_DTYPES),
)
@settings(max_examples=60, deadline=None)
def test_attention_on_the_host_is_that_of_matrix_products(
    counts: list[int], heads: tuple[int, int], head_dim: int, seed: int, dtype: torch.dtype
) -> None:
    """Of rows with different numbers of inputs, each of which sees any places of its slot, also its own.

    The products are float32's, of the same numbers: in bfloat16 the loop differs from them by its result's rounding.
    """
    generator, shape = torch.Generator().manual_seed(seed), shape_of(*heads, head_dim)
    rows = np.repeat(np.arange(len(counts)), counts)
    columns = number_in_row(rows)
    visible = torch.rand(len(rows), PLACES, generator=generator) < 0.3
    places = torch.from_numpy(20 + columns)
    visible[torch.arange(len(rows)), places] = True
    tensors = [torch.from_numpy(array) for array in (rows, columns)]
    inputs = Inputs(places, places, *tensors, places, visible, len(counts), max(counts))
    qkv = torch.randn(len(rows), heads[0] + 2 * heads[1], head_dim, generator=generator).to(dtype)
    caches = [KVCache(shape, slots=6, places=PLACES, dtype=kind, device="cpu") for kind in (dtype, torch.float32)]
    caches[0].kv.copy_(torch.randn(caches[0].kv.shape, generator=generator))
    caches[1].kv.copy_(caches[0].kv)
    found, expected = HostAttention(caches[0], inputs)(1, qkv), CachedAttention(caches[1], inputs)(1, qkv.float())
    rounding = 2**-8 if dtype == torch.bfloat16 else 0.0
    assert torch.allclose(found.float(), expected, rtol=rounding, atol=2e-5)
    assert torch.equal(caches[0].kv.float(), caches[1].kv)


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    nodes=st.integers(0, 9),
    seed=st.integers(0, 99),
    dtype=st.sampled_from(HOST_DTYPES),
)
@settings(max_examples=40, deadline=None)
def test_attention_of_trees_reads_only_what_is_seen(
    lengths: list[int], nodes: int, seed: int, dtype: torch.dtype
) -> None:
    """Draft tokens see their sample and their ancestors; whatever else is in the cache is no number here."""
    random, size = np.random.default_rng(seed), len(lengths)
    rows = np.sort(random.integers(0, size, nodes))
    tree, anchors = DraftTree(), [[ROOT] for _ in lengths]
    for number, row in enumerate(rows):
        anchors[row].append(number)
    parents = np.array(
        [random.choice([a for a in anchors[row] if a < node]) for node, row in enumerate(rows)], np.int64
    )
    depths = np.ones(nodes, np.int64)
    for node, parent in enumerate(parents):
        depths[node] = 1 if parent == ROOT else depths[parent] + 1
    tree.add_recalled(rows, parents, depths, np.zeros(nodes, np.int64), np.zeros(nodes, np.bool_))
    tokens = random.integers(0, 2, nodes)
    made = with_drafts(np.zeros(size, np.int64), np.array(lengths), tree, np.arange(nodes), tokens, torch.device("cpu"))
    inputs, generator = made.inputs, torch.Generator().manual_seed(seed)
    cache, other = (
        KVCache(shape_of(4, 2, 12), slots=size, places=PLACES, dtype=kind, device="cpu")
        for kind in (dtype, torch.float32)
    )
    cache.kv.copy_(torch.randn(cache.kv.shape, generator=generator))
    other.kv.copy_(cache.kv)
    for row, length in enumerate(lengths):
        cache.kv[:, :, row, :, length:] = float("nan")
    qkv = torch.randn(size + nodes, 8, 12, generator=generator).to(dtype)
    if nodes:  # nor does a draft token that overflows spoil those that do not see it
        qkv[-1, 4:], seen = float("inf"), inputs.visible[:, inputs.places[-1]] & (inputs.rows == inputs.rows[-1])
    else:
        seen = torch.zeros(size, dtype=torch.bool)
    found = HostAttention(cache, inputs)(1, qkv)
    expected = CachedAttention(other, inputs)(1, torch.nan_to_num(qkv.float(), posinf=0.0))
    rounding = 2**-8 if dtype == torch.bfloat16 else 0.0
    assert torch.allclose(found[~seen].float(), expected[~seen], rtol=rounding, atol=2e-5)
    _check_moves(made, np.array(lengths), random.integers(0, 2, size + nodes))  # so that many are accepted


def _check_moves(made: Verification, lengths: np.ndarray, choices: np.ndarray) -> None:
    """Inputs stand in their order behind what is cached: an accepted chain need not move, and others move forward."""
    nodes = made.nodes
    assert np.array_equal(nodes.places, lengths[nodes.rows] - 1 + number_in_row(nodes.rows))
    _, _, _, _, (rows, sources, targets) = accept(nodes, choices, lengths)
    assert (targets < sources).all() and (rows[1:] >= rows[:-1]).all()
    same = rows[1:] == rows[:-1]
    assert (np.diff(sources)[same] > 0).all() and (np.diff(targets)[same] > 0).all()


def test_much_work_is_left_to_matrix_products(monkeypatch: pytest.MonkeyPatch) -> None:
    made = KVCache(shape_of(4, 2, 12), slots=2, places=PLACES, dtype=torch.float32, device="cpu")
    zeros = torch.zeros(8, dtype=torch.int64)
    inputs = Inputs(zeros, zeros, zeros, zeros, zeros, torch.ones(8, PLACES, dtype=torch.bool), 2, 4)
    assert isinstance(step_attention(made, inputs), HostAttention)
    monkeypatch.setattr(host_cpu, "mkl_has_avx512", lambda: False)
    monkeypatch.setitem(LIMITS, torch.float32, (3 * PLACES * 12, 0))
    assert isinstance(step_attention(made, inputs), HostAttention)
    monkeypatch.setitem(LIMITS, torch.float32, (3 * PLACES * 12 - 1, 0))
    assert isinstance(step_attention(made, inputs), CachedAttention)
    monkeypatch.setattr(host_cpu, "mkl_has_avx512", lambda: True)
    monkeypatch.setitem(LIMITS_WITH_MKL, torch.float32, (2 * PLACES * 12, 2 * PLACES * 12))
    assert isinstance(step_attention(made, inputs), HostAttention), "the second part counts for both samples together"
    monkeypatch.setitem(LIMITS_WITH_MKL, torch.float32, (2 * PLACES * 12, 2 * PLACES * 12 - 1))
    assert isinstance(step_attention(made, inputs), CachedAttention)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accepted_kv_moves_as_in_torch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In row 0 the second token comes to the place from which the first one went."""
    rows, sources, targets = np.array([0, 0, 0, 2]), np.array([21, 23, 26, 20]), np.array([20, 21, 22, 9])
    on_host, in_torch = (KVCache(shape_of(4, 2, 12), slots=3, places=PLACES, dtype=dtype, device="cpu") for _ in "ab")
    on_host.kv.copy_(torch.randn(on_host.kv.shape))
    in_torch.kv.copy_(on_host.kv)
    on_host.commit(rows, sources, targets)
    monkeypatch.setattr(in_torch, "_words", None)
    in_torch.commit(rows, sources, targets)
    assert torch.equal(on_host.kv, in_torch.kv) and cache_module.COMPILES


def slots_of(count: int, vocabulary: int, temperatures: list[float], forced: list[bool]) -> SlotState:
    slots = SlotState(count, vocabulary, "cpu")
    noise = seed_states(torch.arange(count) * 2**33 + 7)
    slots.noise[:], slots.host_noise[:] = noise, noise.numpy()
    slots.lengths[:] = np.arange(count) * 3 + 1
    slots.temperatures[:], slots.host_temperatures[:] = torch.tensor(temperatures), temperatures
    slots.forced[:], slots.host_forced[:] = torch.tensor(forced), forced
    slots.host_stops[:, ::5] = True
    slots.stops[:] = torch.from_numpy(slots.host_stops)
    slots.any_forced = any(forced)
    return slots


@given(
    rows=st.lists(st.tuples(st.sampled_from([0.0, 0.3, 1.0, 2.5]), st.booleans()), min_size=1, max_size=6),
    vocabulary=st.sampled_from([3, 29, 64, 300, 3000]),
    spread=st.sampled_from([0.0, 1.0, 1000.0]),
    count=st.integers(1, 3),
    some=st.booleans(),
    seed=st.integers(0, 999),
)
@example(rows=[(0.0, False), (1.0, True)], vocabulary=3, spread=0.0, count=3, some=False, seed=0)
@settings(max_examples=200, deadline=None)
def test_the_best_tokens_are_those_of_all_noise(
    rows: list[tuple[float, bool]], vocabulary: int, spread: float, count: int, some: bool, seed: int
) -> None:
    """Also where tokens are banned, logits are equal, and for a part of the vocabulary in another order."""
    temperatures, forced = zip(*rows, strict=True)
    slots = slots_of(len(rows), vocabulary, list(temperatures), list(forced))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(vocabulary, generator=generator)[: max(3, vocabulary // 2)] if some else None
    width = vocabulary if ids is None else len(ids)
    at = np.repeat(np.arange(len(rows)), 2)
    depths = np.tile([0, 3], len(rows))
    logits = spread * torch.randn(len(at), width, generator=generator)
    noise = gumbel(
        torch.arange(len(rows))[at] * 2**33 + 7,
        torch.from_numpy(slots.lengths[at] - 1 + depths),
        vocabulary if ids is None else ids,
    )
    T = slots.temperatures[at]
    banned = slots.stops[at] & slots.forced[at, None]
    banned = banned if ids is None else banned[:, ids]
    scores = perturbed_scores(scaled_logits(logits, T), T, noise, banned)
    order = torch.argsort(scores, dim=-1, descending=True, stable=True)[:, :count]
    expected = select_tokens(logits, T, noise, banned)
    host_ids = None if ids is None else ids.numpy()
    found = best_tokens(logits.numpy(), slots.next_tokens, at, depths, count, host_ids)
    real = torch.isfinite(scores.gather(-1, order)).numpy()
    assert real[:, 0].all() or banned.all(-1).any()
    assert (found.columns[real] == order.numpy()[real]).all()
    assert all(len(set(columns)) == count and 0 <= min(columns) <= max(columns) < width for columns in found.columns)
    close = partial(np.allclose, rtol=1e-12, atol=1e-12)
    assert close(found.scores[real], scores.gather(-1, order).numpy()[real])
    on_device = DeviceNoise(slots, len(rows), 4)
    device = on_device.best(logits, at, depths, count, ids)
    assert close(device.scores[real], found.scores[real])
    ties = (T == 0) & (spread == 0.0)  # of equal ones torch takes any
    untied = real & ~ties.numpy()[:, None]
    assert (device.columns[untied] == found.columns[untied]).all()
    if ids is None:
        sure, close = real[:, 0], partial(np.allclose, rtol=1e-6, atol=1e-5)
        chosen = choose_tokens(logits.numpy(), slots.next_tokens, at, depths)
        assert (chosen.tokens == found.columns[:, 0]).all()
        assert close(chosen.logprobs[sure], expected.logprobs.numpy()[sure])
        assert close(on_device.choose(logits, at, depths).logprobs[sure], chosen.logprobs[sure])


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_columns_differ_whatever_the_logits_are(value: float) -> None:
    """Else siblings in a draft tree would have the same token."""
    slots, logits = slots_of(1, 29, [1.0], [False]), np.full((1, 29), value, np.float32)
    logits[0, 2] = 0.5
    found = best_tokens(logits, slots.next_tokens, np.zeros(1, np.int64), np.zeros(1, np.int64), 4)
    assert len(set(found.columns[0])) == 4 and (value != float("-inf") or found.columns[0, 0] == 2)


def test_a_temperature_too_small_for_float32_is_greedy() -> None:
    slots, logits = slots_of(1, 29, [1e-50], [False]), np.arange(29, dtype=np.float32)[None]
    zero = np.zeros(1, np.int64)
    assert choose_tokens(logits, slots.next_tokens, zero, zero).tokens[0] == 28
    assert DeviceNoise(slots, 1, 1).choose(torch.from_numpy(logits), zero, zero).tokens[0] == 28


def test_a_wrong_bound_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With bounds that are too low the best token would be left out: what the test above would not let pass."""
    slots = slots_of(1, 300, [1.0], [False])
    zeros, logits = np.zeros(64, np.int64), np.zeros((64, 300), np.float32)
    depths = np.arange(64)
    right = best_tokens(logits, slots.next_tokens, zeros, depths, 1).columns
    monkeypatch.setattr(
        "rlhfspec_mega.sampling.host_select._most_noise", lambda: np.linspace(-9, 0, 1024).astype(np.float32)
    )
    assert (best_tokens(logits, slots.next_tokens, zeros, depths, 1).columns != right).any()


def test_logits_that_are_not_numbers_have_no_logprob() -> None:
    slots = slots_of(1, 29, [1.0], [False])
    logits = torch.full((1, 29), float("nan"))
    found = step_noise(slots, 1, 1).choose(logits, np.zeros(1, np.int64), np.zeros(1, np.int64))
    assert np.isnan(found.logprobs[0]) and 0 <= found.tokens[0] < 29
