"""Examples of supervised tasks: answers to learn, and pairs of a chosen and a rejected response."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlhfspec_mega.config.schema.generation import DataConfig
from rlhfspec_mega.data.chain_sums import ChainSums, answer_text, corrupted, demonstration
from rlhfspec_mega.data.files import read_columns
from rlhfspec_mega.data.prompts import encode_prompts
from rlhfspec_mega.errors import UserError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Example:
    """A prompt and its responses, each with its end-of-text token: one to learn, or a chosen and a rejected one."""

    prompt: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...]


class ExampleStream:
    """Examples in training order, which depends on data and seed only; every epoch holds each once, shuffled anew.

    Args:
        example: example by number.
        size: number of examples; None: endless, read in order.
        fingerprint: equal for equal data.
    """

    def __init__(
        self, example: Callable[[int], Example], size: int | None, fingerprint: str, seed: int, shuffle: bool
    ) -> None:
        self._example, self.size, self.fingerprint = example, size, fingerprint
        self._seed, self._shuffle = seed, shuffle
        self._order_epoch, self._order = -1, list[int]()

    def batch(self, number: int, size: int, epochs: int) -> list[Example]:
        """Batch `number`, counted from 0, of so many examples; it may span epochs, and ends with the last of them."""
        end = (number + 1) * size if self.size is None else min((number + 1) * size, epochs * self.size)
        return [self._example(self._row(place)) for place in range(number * size, end)]

    def first(self, count: int) -> list[Example]:
        """The first examples in the data's own order, as many as there are up to `count`."""
        return [self._example(row) for row in range(count if self.size is None else min(count, self.size))]

    def _row(self, place: int) -> int:
        if self.size is None:
            return place
        epoch, row = divmod(place, self.size)
        if not self._shuffle:
            return row
        if epoch != self._order_epoch:
            self._order_epoch, self._order = epoch, list(range(self.size))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        return self._order[row]


class ExampleMaker:
    """Makes examples of the rows of a task: text to tokens, within the longest sequence.

    Args:
        pairs: whether each example has a chosen and a rejected response.
        max_prompt, max_response: most tokens of each; longer examples are left out of files, with a warning.
    """

    def __init__(self, config: DataConfig, tokenizer: Any, pairs: bool, max_prompt: int, max_response: int) -> None:
        self._config, self._tokenizer, self._pairs = config, tokenizer, pairs
        self._max_prompt, self._max_response = max_prompt, max_response

    def streams(self, seed: int, held_out: bool) -> tuple[ExampleStream, ExampleStream | None]:
        """The training examples and, if asked for, the held-out ones.

        Raises UserError for any fault of the data settings or files.
        """
        if self._config.kind == "chain_sums":
            task = ChainSums.from_config(self._config, seed)
            self._check_longest(task)
            return self._of_task(task, "train", seed), self._of_task(task, "eval", seed) if held_out else None
        train = self._of_files(self._config.train, seed)
        return train, self._of_files(self._config.eval, seed) if held_out and self._config.eval else None

    def _of_task(self, task: ChainSums, split: str, seed: int) -> ExampleStream:
        def example(number: int) -> Example:
            text = task.prompt_text(split, number)
            if self._pairs:
                return self._example(text, (answer_text(text), corrupted(text, number)))
            return self._example(text, (demonstration(text, number),))

        return ExampleStream(example, None, f"{task} {split}", seed, shuffle=False)

    def _of_files(self, paths: Sequence[str], seed: int) -> ExampleStream:
        config, digest = self._config, hashlib.sha256()
        answers = (config.chosen_column, config.rejected_column) if self._pairs else (config.answer_column,)
        rows = read_columns(paths, config.prompt_column, answers)
        kept = []
        for prompt, *responses in rows:
            digest.update(repr((prompt, responses)).encode("utf-8", "surrogatepass"))
            example = self._example(prompt, responses)
            if len(example.prompt) <= self._max_prompt and max(map(len, example.responses)) <= self._max_response:
                kept.append(example)
        limits = f"rollout.max_prompt_tokens={self._max_prompt} and max_new_tokens={self._max_response}"
        if not kept:
            raise UserError(f"No example of {', '.join(paths)} is within {limits}: raise them.")
        if len(kept) < len(rows):
            logger.warning(
                "%d of %d examples of %s are longer than %s allow, and are left out.",
                *(len(rows) - len(kept), len(rows), ", ".join(paths), limits),
            )
        return ExampleStream(kept.__getitem__, len(kept), digest.hexdigest(), seed, config.shuffle)

    def _example(self, prompt: str, responses: Sequence[str]) -> Example:
        (tokens,) = encode_prompts(self._tokenizer, [prompt], self._config.chat_template)
        return Example(tokens, tuple(self._response(response) for response in responses))

    def _response(self, text: str) -> tuple[int, ...]:
        return (*self._tokenizer(text, add_special_tokens=False)["input_ids"], self._tokenizer.eos_token_id)

    def _check_longest(self, task: ChainSums) -> None:
        longest = self._example(task.longest_prompt(), [demonstration(task.longest_prompt(), 0)])
        if len(longest.prompt) > self._max_prompt:
            raise UserError(
                f"A chain of data.max_terms={task.max_terms} terms has up to {len(longest.prompt)} prompt tokens, more "
                f"than rollout.max_prompt_tokens={self._max_prompt}; raise it or lower data.max_terms."
            )
