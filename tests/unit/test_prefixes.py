"""The draft reads prompts, and tokens of plain steps, when something is drafted: as if it had read them at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhfspec_mega.draft import model
from rlhfspec_mega.models.transformer import causal_attention
from rlhfspec_mega.planning.tree import Batch
from rlhfspec_mega.rollout.torch_engine import drafter, unread
from rlhfspec_mega.rollout.torch_engine.engine import TorchEngine
from rlhfspec_mega.rollout.torch_engine.prefill import Prefill
from rlhfspec_mega.rollout.torch_engine.prefixes import PrefixPast, chunk
from rlhfspec_mega.rollout.torch_engine.scheduler import PrefixGroup
from rlhfspec_mega.types import GenerationRequest, GenerationResult
from tests.near_tie import assert_same
from tests.random_trees import RandomTrees
from tests.unit.test_losslessness import SHAPE, WEIGHTS, make_engine, make_judge
from tests.unit.test_torch_engine import finish, one_thread, send_weights

__all__ = ["one_thread"]


@pytest.fixture(autouse=True)
def whole_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few entries are computed in 8 bits, and what is read at once is many entries."""
    monkeypatch.setattr(model, "most_entries", lambda matrices: 0)


PROMPTS = [tuple(1 + place % 20 for place in range(length)) for length in (1, 2, 10, 31, 10)]


class From(RandomTrees):
    """Drafts from some step on; before it, steps are plain."""

    def __init__(self, step: int, follows: bool = True) -> None:
        super().__init__(0)
        self._step, self._follows, self._count = step, follows, 0

    def follows(self, size: int) -> bool:
        return self._follows

    def rests(self, size: int, able: bool) -> int:
        self._count += 1
        return int(self._count <= self._step)

    def depth(self, batch: Batch) -> int:
        return 3 if batch.draftable else 0


def requests(tokens: int = 40) -> list[GenerationRequest]:
    return [GenerationRequest(str(n), str(n), prompt, 5 + n, tokens, 1.0) for n, prompt in enumerate(PROMPTS)]


def draft_kv(engine: TorchEngine, sample: str, tokens: int) -> torch.Tensor:
    """The draft's KV of a sample's first tokens."""
    committed = engine.committed_positions(sample)
    assert committed is not None and committed["draft"] >= tokens
    return engine.committed_kv(sample, "draft", 0, tokens).clone()


def step_until(engine: TorchEngine, tokens: int) -> None:
    """Decode until every sample has so many tokens."""
    scheduler = engine._scheduler
    while scheduler.waiting or min(len(sample.tokens) for sample in scheduler.active) < tokens:
        engine.poll(0)


def whole_kv(engine: TorchEngine, tokens: list[int]) -> torch.Tensor:
    """The draft's KV of a text by its whole layer, from one pass of the target over all of it."""
    drafting = engine._decoder.drafter
    assert drafting is not None
    draft, features = drafting.model, unread.Features(drafting.model.shape.taps)
    positions, found = torch.arange(len(tokens)), list[torch.Tensor]()

    def attention(layer: int, qkv: torch.Tensor) -> torch.Tensor:
        found.append(qkv[:, draft.shape.num_heads :])
        return qkv[:, : draft.shape.num_heads]

    engine._model.hidden(torch.tensor([tokens]), positions[None], causal_attention(SHAPE), features)
    states = draft.fuse(torch.cat(features.outputs(), dim=-1)[:-1])
    draft.advance(torch.tensor(tokens[1:]), states, positions[:-1], attention)
    return found[0].unflatten(1, (2, -1)).permute(1, 2, 0, 3)[None]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 10), st.integers(0, 1))
def test_chunks_have_each_position_of_a_prefix_once_and_no_other(lengths: list[int], size: int, shift: int) -> None:
    longest, found = max(lengths), list[tuple[int, int, int]]()
    tokens = torch.arange(len(lengths) * (longest + shift)).view(len(lengths), -1)
    for first in range(0, longest, size):
        end = min(first + size, longest)
        inputs = chunk(tokens, np.array(lengths), first, end, shift)
        rows, places, columns = inputs.rows.tolist(), inputs.places.tolist(), inputs.columns.tolist()
        assert columns == [place - first for place in places]
        assert (inputs.batch, inputs.queries) == (len(lengths), max(columns) + 1)
        assert inputs.visible.tolist() == [[other <= place for other in range(end)] for place in places]
        assert list(zip(rows, places, strict=True)) == sorted(zip(rows, places, strict=True))
        found += zip(rows, places, inputs.tokens.tolist(), strict=True)
    assert sorted(found) == [
        (row, place, int(tokens[row, place + shift])) for row, length in enumerate(lengths) for place in range(length)
    ]


@pytest.mark.parametrize("size", [1, 4, 7, 64])
@pytest.mark.parametrize("read_after", [1, 3, 100])
def test_prefixes_that_end_in_different_chunks_are_prefilled_as_each_alone(size: int, read_after: int) -> None:
    engine = make_engine(8, From(0))
    drafting = engine._decoder.drafter
    assert drafting is not None
    prefixes = [tuple(1 + (place * 3 + length) % 20 for place in range(length)) for length in (3, 23, 1, 8, 9, 16)]

    def prefilled(some: list[tuple[int, ...]], size: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        groups = [PrefixGroup(prefix, []) for prefix in some]
        with torch.inference_mode():
            prefill, chunks = Prefill(engine._model, drafting, groups), 0
            while not prefill.advance(size):
                chunks += 1
                if chunks == read_after and prefill._unread:
                    prefill._unread.read()
        found = []
        for group in groups:
            assert group.kv is not None and isinstance(group.draft, PrefixPast)
            found.append((group.kv, group.draft.kv(), group.draft.features))
        return found

    for one, prefix in zip(prefilled(prefixes, size), prefixes, strict=True):
        for part, alone in zip(one, prefilled([prefix], 64)[0], strict=True):
            torch.testing.assert_close(part, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["prompts and drafting", "no room", "before a migration"])
@pytest.mark.parametrize("apart", [1, 10**6])
def test_keys_and_values_are_those_of_the_whole_layer(way: str, apart: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens' choice does not depend on what the draft reads, so nothing else would show that it is wrong."""
    monkeypatch.setitem(drafter.APART, "cpu", apart)
    if way == "no room":
        monkeypatch.setattr(drafter, "BACKLOG", 6)
    engine = make_engine(8, From(7 if way == "prompts and drafting" else 1000))
    engine.submit(requests())
    step_until(engine, 14)
    if way == "before a migration":
        engine.catch_up_draft([str(n) for n in range(len(PROMPTS))])
    for number, prompt in enumerate(PROMPTS):
        text = [*prompt, *engine._held[str(number)].tokens]
        entries = len(prompt) + (5 if way == "no room" else 11)
        expected = whole_kv(engine, text)[:, :, :, :entries]
        torch.testing.assert_close(draft_kv(engine, str(number), entries), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("late", [1, 7])
@pytest.mark.parametrize("kept", [1, 64])
def test_what_is_read_late_is_what_is_read_at_once(late: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread, "STEPS_KEPT", kept)
    monkeypatch.setattr(drafter, "STEPS_KEPT", kept)
    found = []
    for step in (0, late):
        engine = make_engine(8, From(step))
        engine.submit(requests())
        step_until(engine, 12)
        found.append([draft_kv(engine, str(n), len(prompt) + 7) for n, prompt in enumerate(PROMPTS)])
    for early, delayed in zip(*found, strict=True):
        torch.testing.assert_close(early, delayed, rtol=1e-4, atol=1e-5)


def test_samples_that_leave_take_what_was_not_read() -> None:
    engine, other = make_engine(8, From(1000)), make_engine(8, From(0))
    engine.submit(requests())
    step_until(engine, 5)
    for number in range(len(PROMPTS)):
        other.import_sample(engine.export_sample(str(number)))
    step_until(other, 12)
    at_once = make_engine(8, From(0))
    at_once.submit(requests())
    step_until(at_once, 12)
    for number, prompt in enumerate(PROMPTS):
        moved, stayed = (draft_kv(one, str(number), len(prompt) + 7) for one in (other, at_once))
        torch.testing.assert_close(moved, stayed, rtol=1e-4, atol=1e-5)


def test_samples_leave_in_the_middle_of_reading_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts in several chunks are read as they come, and the rest when their samples leave."""
    monkeypatch.setattr(drafter, "STEPS_KEPT", 8)
    prompt = tuple(1 + place % 20 for place in range(40))
    engine = make_engine(2, From(1000))
    engine._prefill_chunk = 16
    engine.submit([GenerationRequest("0", "0", prompt, 5, 20, 1.0)])
    step_until(engine, 2)
    snapshot = engine.export_sample("0")  # outside a step
    at_once = make_engine(2, From(0))
    at_once.submit([GenerationRequest("0", "0", prompt, 5, 20, 1.0)])
    step_until(at_once, 2)
    assert snapshot.draft is not None
    torch.testing.assert_close(snapshot.draft.kv[:, :, :, :38], draft_kv(at_once, "0", 38), rtol=1e-4, atol=1e-5)


def test_prompts_that_were_not_read_count_as_backlog() -> None:
    policy = From(4)
    engine = make_engine(8, policy)
    engine.submit(requests())
    step_until(engine, 9)
    first, later = policy.records[0].batch, policy.records[1].batch
    assert first.backlog >= sum(len(prompt) - 1 for prompt in PROMPTS) and later.backlog <= 4 * len(PROMPTS)


def test_nothing_is_drafted_for_samples_that_are_not_followed() -> None:
    policy = From(0, follows=False)
    engine = make_engine(8, policy)
    engine.submit(requests())
    step_until(engine, 3)
    assert engine.committed_positions("2") == {"target": len(PROMPTS[2]) + len(engine._held["2"].tokens) - 1}
    follower = make_engine(8, From(0))
    follower.import_sample(engine.export_sample("2"))
    step_until(follower, 12)
    draft_kv(follower, "2", len(PROMPTS[2]) + 7)
    finish(engine)
    assert not any(record.tree.depth for record in policy.records)


def test_a_slot_that_is_taken_again_does_not_get_the_last_samples_prefix() -> None:
    policy = From(10**6)
    engine = make_engine(2, policy)
    for first in (3, 8, 21):
        engine.submit([GenerationRequest(f"{first}.{n}", "g", (first, n, 4), n, 3 + n, 1.0) for n in range(4)])
        finish(engine)
    assert engine._decoder.drafter is not None
    assert engine._decoder.drafter.backlog(2) == 0, "those of samples that have ended are forgotten"
    engine.submit([GenerationRequest("last", "last", (9, 9, 9), 0, 30, 1.0)])
    policy._step = 0
    step_until(engine, 10)
    alone = make_engine(2, From(0))
    alone.submit([GenerationRequest("last", "last", (9, 9, 9), 0, 30, 1.0)])
    step_until(alone, 10)
    torch.testing.assert_close(draft_kv(engine, "last", 8), draft_kv(alone, "last", 8), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("follows", [False, True])
def test_a_prompt_that_is_in_a_slot_is_not_prefilled_again(follows: bool) -> None:
    """Unless the draft is to read it, too, or it was prefilled with earlier weights, or is another one."""
    engine, prompt = make_engine(4, From(10**9, follows)), tuple(range(1, 20))
    members = [GenerationRequest(str(i), "g", prompt, 5 + i, 60, ignore_stop=True) for i in range(4)]
    members[2] = replace(members[2], prompt_tokens=prompt[::-1])
    read, found = list[int](), list[GenerationResult]()
    for version, member in enumerate(members, start=1):
        if version == 4:
            send_weights(engine, WEIGHTS, version=4, piece=10**6)
        engine.submit([member])
        found += engine.poll(0)
        read.append(engine.stats()["prefill_tokens"])
    assert read == ([18, 36, 54, 72] if follows else [18, 18, 36, 54])
    results, alone = {result.sample_id: result for result in found} | finish(engine), make_engine(1, None)
    alone.submit(members)  # one after the other
    assert_same(finish(alone), results, members, make_judge(SHAPE, WEIGHTS))
