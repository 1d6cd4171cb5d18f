"""Samples as the reward model reads them: the tokens there are, or its own tokenizer's tokens of the text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rlhfspec_mega.data.tokenizer import has_tokenizer, load_tokenizer
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.types import Prompt


class RewardEncoder:
    """Called with prompt and response tokens of a sample, it returns those for the reward model.

    If the reward model's tokenizer is another one than the actor's, the text is encoded again: by its chat template if
    it has one, else prompt and response joined, with its end-of-text token. transformers reads a classifier's score at
    the last token that is not `pad_token_id` of config.json, so such tokens at the end are left out. A text with more
    tokens than the model has positions loses its first ones.

    Args:
        tokenizer: the actor's.
        stops: tokens that end a response and are not part of its text.
        shape: of the reward model.

    Raises UserError for a tokenizer that cannot be read, or whose tokens the model does not know.
    """

    def __init__(self, path: Path, tokenizer: Any, stops: Sequence[int], shape: ModelShape) -> None:
        self._tokenizer, self._stops, self._most = tokenizer, frozenset(stops), shape.max_positions
        own = load_tokenizer(path) if has_tokenizer(path) else tokenizer
        if len(own) > shape.vocab_size:
            raise UserError(
                f"reward.model.path={path} has a vocabulary of {shape.vocab_size} tokens, and its tokenizer "
                f"{len(own)}: copy the files of its own tokenizer there."
            )
        self._own = own if own.get_vocab() != tokenizer.get_vocab() else None
        self._pad = json.loads((path / "config.json").read_text(encoding="utf-8")).get("pad_token_id")
        self._texts: dict[tuple[int, ...], str] = {}

    def remember(self, prompts: Iterable[Prompt]) -> None:
        """Note the text of the prompts whose samples come next."""
        if self._own is not None:
            self._texts = {prompt.tokens: prompt.text for prompt in prompts}

    def __call__(self, prompt: Sequence[int], response: Sequence[int]) -> tuple[int, ...]:
        tokens = [*prompt, *response] if self._own is None else self._encoded(tuple(prompt), response)
        while len(tokens) > 1 and tokens[-1] == self._pad:
            tokens.pop()
        return tuple(tokens[-self._most :])

    def _encoded(self, prompt: tuple[int, ...], response: Sequence[int]) -> list[int]:
        assert self._own is not None
        text = self._tokenizer.decode(
            [token for token in response if token not in self._stops], skip_special_tokens=True
        )
        if self._own.chat_template:
            messages = [{"role": "user", "content": self._texts[prompt]}, {"role": "assistant", "content": text}]
            return list(self._own.apply_chat_template(messages, tokenize=True, return_dict=False))
        return [*self._own(self._texts[prompt] + text)["input_ids"], self._own.eos_token_id]
