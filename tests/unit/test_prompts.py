"""The prompt stream: each row once per epoch, order free of batch sizes, exact resume, loud skips."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfspec_mega.config.schema.generation import DataConfig
from rlhfspec_mega.data.prompts import ListSource, PromptStream, make_prompts
from rlhfspec_mega.data.tokenizer import load_tokenizer, make_byte_tokenizer
from rlhfspec_mega.errors import UserError


def stream(size, seed=0, shuffle=True, name="q"):
    return PromptStream(ListSource([(f"{name}{i}", f"a{i}", (i,)) for i in range(size)]), seed, shuffle)


def take(prompts, batches):
    return [prompt for count in batches for prompt in prompts.next_batch(count)]


sizes = st.integers(1, 12)
batch_sizes = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@given(sizes, st.integers(0, 5), st.booleans(), batch_sizes)
def test_every_epoch_holds_every_row_once(size, seed, shuffle, batches):
    prompts = take(stream(size, seed, shuffle), batches)
    assert [prompt.index for prompt in prompts] == list(range(sum(batches)))
    rows = [prompt.tokens[0] for prompt in prompts]
    for start in range(0, len(rows), size):
        epoch = rows[start : start + size]
        assert len(set(epoch)) == len(epoch)
        assert len(epoch) < size or set(epoch) == set(range(size))
        assert shuffle or epoch == list(range(len(epoch)))


@given(sizes, st.booleans(), batch_sizes, batch_sizes)
def test_order_does_not_depend_on_batch_sizes_and_resumes_exactly(size, shuffle, before, after):
    whole = stream(size, 1, shuffle).next_batch(sum(before) + sum(after))
    first = stream(size, 1, shuffle)
    head = take(first, before)
    cursor = json.loads(json.dumps(first.state_dict()))
    second = stream(size, 1, shuffle)
    second.next_batch(3)  # what was read before loading a cursor must not matter
    second.load_state_dict(cursor)
    assert head + take(second, after) == whole


def test_epochs_and_seeds_are_shuffled_differently():
    prompts = stream(50)
    first, second = prompts.next_batch(50), prompts.next_batch(50)
    orders = [[p.text for p in part] for part in (first, second, stream(50, seed=1).next_batch(50))]
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize(
    "other",
    [stream(5), stream(4, name="r"), stream(4, seed=1), stream(4, shuffle=False)],
    ids=["size", "name", "seed", "order"],
)
def test_a_foreign_cursor_is_refused(other):
    cursor = stream(4).state_dict()
    with pytest.raises(UserError, match="belongs to other training data"):
        other.load_state_dict(cursor)


def test_a_new_epoch_is_announced(caplog):
    with caplog.at_level(logging.INFO):
        stream(4).next_batch(4)
        assert not caplog.messages
        stream(4).next_batch(9)
    assert caplog.messages == [f"Epoch {epoch} of the 4 training prompts begins." for epoch in (2, 3)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    make_byte_tokenizer(path)
    return load_tokenizer(path)


@pytest.fixture
def jsonl(tmp_path):
    def write(name, questions):
        path = tmp_path / name
        path.write_text("".join(json.dumps({"question": q, "answer": f"#### {len(q)}"}) + "\n" for q in questions))
        return str(path)

    return write


def test_files_through_the_chat_template(tokenizer, jsonl):
    config = DataConfig(kind="files", train=[jsonl("t.jsonl", ["ab"])], eval=[jsonl("e.jsonl", ["c", "d", "e"])])
    plain, held_out = make_prompts(config, tokenizer, 64, 2, 0)
    assert plain.next_batch(1)[0].tokens == (257, *b"ab")
    assert [(p.index, p.text, p.answer) for p in held_out] == [(0, "c", "#### 1"), (1, "d", "#### 1")]
    config.chat_template = True
    chat, _ = make_prompts(config, tokenizer, 64, 0, 0)
    assert chat.next_batch(1)[0].tokens == (257, *b"user: ab\nassistant: ")
    assert chat.next_batch(1)[0].text == "ab"


def test_overlong_prompts_are_skipped_with_their_number(tokenizer, jsonl, caplog):
    config = DataConfig(kind="files", train=[jsonl("t.jsonl", ["a" * 9, "b" * 10, "c" * 30])], shuffle=False)
    prompts, _ = make_prompts(config, tokenizer, 10, 0, 0)
    assert [p.text[0] for p in prompts.next_batch(2)] == ["a", "a"]
    assert "Skipped 2 of 3 prompts" in caplog.text and "the longest has 31" in caplog.text
    with pytest.raises(UserError, match=r"All 3 prompts of .*t\.jsonl"):
        make_prompts(config, tokenizer, 9, 0, 0)


def test_chain_sums_are_endless_ordered_and_held_out_apart(tokenizer):
    prompts, held_out = make_prompts(DataConfig(), tokenizer, 256, 20, seed=7)
    batch = prompts.next_batch(30)
    assert [p.index for p in batch] == list(range(30))
    assert all(p.tokens == (257, *p.text.encode()) for p in batch + held_out)
    assert not {p.text for p in batch} & {p.text for p in held_out}
    other_task, _ = make_prompts(DataConfig(max_terms=20), tokenizer, 256, 0, seed=7)
    with pytest.raises(UserError, match="other training data"):
        other_task.load_state_dict(prompts.state_dict())


def test_faulty_settings_are_one_sentence(tokenizer, jsonl):
    cases = [
        (DataConfig(kind="magic"), r"data\.kind=magic"),
        (DataConfig(kind="files"), r"needs data\.train"),
        (DataConfig(kind="files", train=[jsonl("t.jsonl", ["a"])]), r"needs data\.eval"),
        (DataConfig(max_terms=500), r"max_terms=500 terms has up to 1001 prompt tokens"),
    ]
    for config, message in cases:
        with pytest.raises(UserError, match=message):
            make_prompts(config, tokenizer, 256, 8, 0)


def test_a_missing_chat_template_is_named(tokenizer, jsonl):
    config = DataConfig(kind="files", train=[jsonl("t.jsonl", ["a"])], chat_template=True)
    template, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        with pytest.raises(UserError, match="has no chat template"):
            make_prompts(config, tokenizer, 256, 0, 0)
    finally:
        tokenizer.chat_template = template
