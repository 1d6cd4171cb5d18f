"""The stand-in for torch_memory_saver: what was given back is no number, and nothing else is touched."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhfspec_mega.rollout.sglang_engine import cpu_kernels

SIZE = 1000  # of tensors whose places the allocator gives out again


@pytest.fixture
def saver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """One without regions."""
    monkeypatch.syspath_prepend(str(cpu_kernels.PACKAGES))
    monkeypatch.delitem(sys.modules, "torch_memory_saver", raising=False)
    yield importlib.import_module("torch_memory_saver").torch_memory_saver
    del sys.modules["torch_memory_saver"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_what_was_given_back_is_no_number_also_when_it_is_back(saver: Any, dtype: torch.dtype) -> None:
    with saver.region(tag="kv_cache"):
        made = [torch.zeros(3, 4, dtype=dtype), torch.empty(0, dtype=dtype), torch.ones(2).to(dtype)]
    saver.pause(tag="kv_cache")
    assert all(bool(one.float().isnan().all()) for one in made)
    saver.resume(tag="kv_cache")
    assert all(bool(one.float().isnan().all()) for one in made)


def test_a_backup_brings_it_back_as_it_was(saver: Any) -> None:
    with saver.region("weights", enable_cpu_backup=True):
        linear, count = torch.nn.Linear(3, 2), torch.arange(5, 7)
    count += 1
    wanted = [linear.weight.detach().clone(), linear.bias.detach().clone(), count.clone()]
    for _ in range(2):
        saver.pause("weights")
        assert linear.weight.isnan().all() and linear.bias.isnan().all() and (count == -1).all()
        saver.resume("weights")
        assert torch.equal(linear.weight, wanted[0]) and torch.equal(linear.bias, wanted[1])
        assert torch.equal(count, wanted[2])
    count += 1
    saver.resume("weights")  # a second time, which has nothing to bring back
    assert torch.equal(count, wanted[2] + 1)


def test_only_its_own_tag_is_given_back(saver: Any) -> None:
    with saver.region("weights", enable_cpu_backup=True):
        weights = torch.ones(3)
    with saver.region("weights"):
        scratch = torch.ones(3)
    with saver.region("kv_cache"):
        cache = torch.ones(3)
    saver.pause("kv_cache")
    assert cache.isnan().all() and torch.equal(weights, torch.ones(3)) and torch.equal(scratch, torch.ones(3))
    saver.pause("weights")
    assert weights.isnan().all() and scratch.isnan().all()
    saver.resume("weights")
    assert torch.equal(weights, torch.ones(3)) and scratch.isnan().all() and cache.isnan().all()


USES: list[Callable[[Tensor], object]] = [
    lambda one: one[1:],
    lambda one: one.view(2, 3),
    lambda one: one.detach().t(),
    lambda one: one.split(2),
    lambda one: torch.nn.Parameter(one),
    lambda one: one.fill_(1.0),
    lambda one: one.copy_(torch.ones(6)),
    lambda one: one.__setitem__(slice(0, 2), 1.0),
    lambda one: torch.mul(torch.ones(6), 1.0, out=one),
    lambda one: torch._foreach_mul_([one], 1.0),
]


@pytest.mark.parametrize("use", USES)
def test_what_was_made_elsewhere_stays(saver: Any, use: Callable[[Tensor], object]) -> None:
    before = torch.ones(6)
    with saver.region("weights"):
        kept = use(before)
    after = torch.ones(6)
    saver.pause("weights")
    saver.resume("weights")
    assert torch.equal(before, torch.ones(6)) and torch.equal(after, torch.ones(6))
    del kept


def test_views_are_given_back_with_what_they_look_at(saver: Any) -> None:
    with saver.region("weights", enable_cpu_backup=True):
        whole = torch.arange(6.0)
        part = whole[2:4]
    del whole
    gc.collect()
    other = part.view(2, 1)
    saver.pause("weights")
    assert other.isnan().all()
    saver.resume("weights")
    assert part.tolist() == [2.0, 3.0]


@pytest.mark.parametrize("freed_when_paused", [False, True])
def test_the_place_of_what_was_freed_is_someone_elses(saver: Any, freed_when_paused: bool) -> None:
    with saver.region("weights", enable_cpu_backup=True):
        freed, kept = [torch.zeros(SIZE) for _ in range(100)], torch.zeros(3)
    places = {one.data_ptr() for one in freed}
    if freed_when_paused:
        saver.pause("weights")
    freed.clear()
    made = [torch.ones(SIZE) for _ in range(100)]
    assert any(one.data_ptr() in places for one in made)
    if not freed_when_paused:
        saver.pause("weights")
    assert kept.isnan().all() and all(torch.equal(one, torch.ones(SIZE)) for one in made)
    saver.resume("weights")
    assert torch.equal(kept, torch.zeros(3)) and all(torch.equal(one, torch.ones(SIZE)) for one in made)


def test_what_processes_and_graphs_need_changes_nothing(saver: Any) -> None:
    with sys.modules["torch_memory_saver"].configure_subprocess(), saver.cuda_graph(tag="graph"), saver.disable():
        made = torch.ones(2)
    saver.pause("graph")
    assert saver.enabled and torch.equal(made, torch.ones(2))
