"""Samples as a reward model reads them, with the actor's tokenizer or its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rlhfspec_mega.data.reward_encoder import RewardEncoder
from rlhfspec_mega.data.tokenizer import load_tokenizer, make_byte_tokenizer
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.hf_config import read_shape
from rlhfspec_mega.types import Prompt

PAD, EOS = 256, 258


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("actor")
    make_byte_tokenizer(directory)
    return load_tokenizer(directory)


def make_model(directory: Path, vocabulary: int, pad: int, positions: int = 64) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=positions,
        num_labels=1,
        pad_token_id=pad,
    )
    transformers.LlamaForSequenceClassification(config).save_pretrained(directory)
    return directory


def make_word_tokenizer(directory: Path, template: str | None = None) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {
        word: number for number, word in enumerate(["<end>", "<unk>", "add", "one", "and", "two", "three", "user"])
    }
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    settings = {"chat_template": template} if template else {}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<end>", unk_token="<unk>", **settings
    ).save_pretrained(directory)


def encoder(path: Path, tokenizer: Any) -> RewardEncoder:
    return RewardEncoder(path, tokenizer, [EOS], read_shape(path))


def test_with_the_actors_tokenizer_the_tokens_stay(tokenizer: Any, tmp_path: Path) -> None:
    encode = encoder(make_model(tmp_path, 259, PAD), tokenizer)
    assert encode((1, 2), [3, EOS]) == (1, 2, 3, EOS)
    assert encode(range(60), range(100, 110)) == (*range(6, 60), *range(100, 110)), "as many as there are positions"


@pytest.mark.parametrize("pad", [PAD, EOS])
def test_the_score_is_read_where_transformers_reads_it(pad: int, tokenizer: Any, tmp_path: Path) -> None:
    """Where EOS is PAD, that is before it: transformers cannot tell the two apart."""
    path = make_model(tmp_path, 259, pad)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path)
    encode, samples = encoder(path, tokenizer), [([1, 2], [3, EOS]), ([1, 2, 3], [4, 5]), ([7], [EOS])]
    longest = max(len(prompt) + len(response) for prompt, response in samples)
    padded = [[*prompt, *response] + [pad] * (longest - len(prompt) - len(response)) for prompt, response in samples]
    expected = model(torch.tensor(padded), attention_mask=torch.tensor(padded) != pad).logits[:, 0].tolist()
    alone = []
    for prompt, response in samples:
        hidden = model.model(torch.tensor([encode(prompt, response)])).last_hidden_state
        alone.append(float(model.score(hidden)[0, -1, 0]))
    assert alone == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("template", [None, "{% for m in messages %}user {{ m['content'] }}{% endfor %}"])
def test_with_a_tokenizer_of_its_own_the_text_is_encoded_again(
    template: str | None, tokenizer: Any, tmp_path: Path
) -> None:
    make_word_tokenizer(make_model(tmp_path, 8, 1), template)
    encode = encoder(tmp_path, tokenizer)
    prompt = Prompt(0, "add one and ", "", tuple(tokenizer("add one and ")["input_ids"]))
    encode.remember([prompt])
    response = [*tokenizer("two three", add_special_tokens=False)["input_ids"], EOS]
    words = {"add": 2, "one": 3, "and": 4, "two": 5, "three": 6, "user": 7, "end": 0}
    text = "user add one and user two three" if template else "add one and two three end"
    assert encode(prompt.tokens, response) == tuple(words[word] for word in text.split())


def test_a_model_that_does_not_know_the_tokens_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a vocabulary of 100 tokens, and its tokenizer 259: copy"):
        encoder(make_model(tmp_path, 100, 0), tokenizer)
    assert json.loads((tmp_path / "config.json").read_text())["pad_token_id"] == 0
