"""The byte tokenizer is lossless on any text and loads as an ordinary Hugging Face tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rlhfspec_mega.data.tokenizer import load_tokenizer, make_byte_tokenizer
from rlhfspec_mega.errors import UserError


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    make_byte_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory):
    return load_tokenizer(directory)


def test_special_tokens_follow_the_256_bytes(tokenizer):
    assert len(tokenizer) == 259
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257, 258)


def test_tokens_are_the_bytes_of_the_text(tokenizer):
    @given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60).filter(lambda text: "<" not in text))
    def check(text):
        tokens = tokenizer(text).input_ids
        assert tokens == [257, *text.encode()]
        assert tokenizer.decode(tokens, skip_special_tokens=True) == text

    check()


def test_every_byte_is_reachable(tokenizer):
    for byte in range(256):
        if byte < 128:
            assert tokenizer.decode([byte]) == chr(byte)
        assert tokenizer.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(byte)) == byte


def test_chat_template_has_one_bos_and_the_generation_prompt(tokenizer):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1="}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<bos>user: 1+1=\nassistant: "
    assert tokenizer(text, add_special_tokens=False).input_ids == [257, *b"user: 1+1=\nassistant: "]


def test_faults_are_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"no tokenizer directory .*model\.path"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(UserError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(UserError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_eos_is_refused(directory, tmp_path):
    import json

    config = json.loads((directory / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
    with pytest.raises(UserError, match="no eos_token"):
        load_tokenizer(tmp_path)


def test_the_class_is_the_one_that_transformers_chooses(directory, tokenizer):
    chosen = AutoTokenizer.from_pretrained(directory)
    assert type(tokenizer) is type(chosen) and tokenizer.get_vocab() == chosen.get_vocab()
    messages = [{"role": "user", "content": "1+1="}]
    assert tokenizer.apply_chat_template(messages) == chosen.apply_chat_template(messages)
