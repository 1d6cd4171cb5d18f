"""Tokenizers: the byte-level one of models made here, and loading of any Hugging Face tokenizer directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.model_directory import find_model

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in GPT-2's byte-level BPE (Radford et al., 2019)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]


def make_byte_tokenizer(directory: str | Path) -> None:
    """Save a byte-level tokenizer as an ordinary Hugging Face tokenizer directory.

    Token i is byte i for i < 256, then <pad>, <bos>, <eos>: 259 tokens, no merges. Encoding prepends <bos>.
    The chat template writes one "role: content" line per message.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, BOS, EOS)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)


def _tokenizer_class(directory: Path) -> Any:
    """AutoTokenizer, or the class that it would choose; its choice looks through all models, which takes a second."""
    try:
        named = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))["tokenizer_class"]
    except (OSError, ValueError, KeyError, TypeError):
        named = None
    if named == "TokenizersBackend" and (directory / "tokenizer.json").is_file():
        from transformers import TokenizersBackend

        return TokenizersBackend
    from transformers import AutoTokenizer

    return AutoTokenizer


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory holds tokenizer files."""
    return any((directory / name).is_file() for name in TOKENIZER_FILES)


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a model's directory (transformers' AutoTokenizer); nothing is downloaded.

    Raises:
        UserError: no such directory, no tokenizer files in it, files that cannot be read, or no end-of-text token.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise UserError(f"There is no tokenizer directory {directory}; set model.path to a Hugging Face directory.")
    directory = find_model(directory).hf_files
    if not has_tokenizer(directory):
        raise UserError(
            f"{directory} holds no tokenizer (looked for {', '.join(TOKENIZER_FILES)}); "
            "copy the model's tokenizer files into it."
        )
    try:
        tokenizer = _tokenizer_class(directory).from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # the library raises many kinds: ValueError, OSError, bare Exception from Rust
        raise UserError(f"The tokenizer in {directory} cannot be read ({error}); download its files again.") from error
    if tokenizer.eos_token_id is None:
        raise UserError(f"The tokenizer in {directory} names no eos_token; set one in its tokenizer_config.json.")
    return tokenizer
