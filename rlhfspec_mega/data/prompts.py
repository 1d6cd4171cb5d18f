"""The stream of training prompts with its cursor, and the held-out prompts."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Sequence
from typing import Any, Protocol

from rlhfspec_mega.config.schema.generation import DataConfig
from rlhfspec_mega.data.chain_sums import TASK_VERSION, ChainSums, answer_text
from rlhfspec_mega.data.files import read_files
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.types import Prompt

logger = logging.getLogger(__name__)


class PromptSource(Protocol):
    """A dataset addressed by row.

    Attributes:
        size: number of rows; None means endless.
        fingerprint: equal for two sources exactly if all their rows are equal.
    """

    @property
    def size(self) -> int | None: ...

    @property
    def fingerprint(self) -> str: ...

    def row(self, number: int) -> tuple[str, str, tuple[int, ...]]:
        """(text, answer, prompt tokens) of row `number`, counted from 0."""


class ListSource:
    """Rows in memory."""

    def __init__(self, rows: Sequence[tuple[str, str, tuple[int, ...]]]) -> None:
        self._rows = rows
        self.size = len(rows)
        digest = hashlib.sha256()
        for text, answer, _ in rows:
            digest.update(f"{len(text)} {len(answer)} {text}{answer}".encode("utf-8", "surrogatepass"))
        self.fingerprint = digest.hexdigest()

    def row(self, number: int) -> tuple[str, str, tuple[int, ...]]:
        return self._rows[number]


class ChainSumsSource:
    """The endless built-in task, tokenised row by row."""

    size = None

    def __init__(self, task: ChainSums, split: str, tokenizer: Any, chat_template: bool) -> None:
        self._task, self._split, self._tokenizer, self._chat_template = task, split, tokenizer, chat_template
        self.fingerprint = f"{task}, version {TASK_VERSION}, {split}"

    def row(self, number: int) -> tuple[str, str, tuple[int, ...]]:
        text = self._task.prompt_text(self._split, number)
        tokens = encode_prompts(self._tokenizer, [text], self._chat_template)[0]
        return text, answer_text(text), tokens


class PromptStream:
    """Prompts in training order. The order depends only on (source, seed, shuffle), never on the sizes of batches.

    Every epoch holds each row exactly once, shuffled anew if `shuffle`; `Prompt.index` counts on across epochs.
    An endless source is read in order, as its rows are random already.
    """

    def __init__(self, source: PromptSource, seed: int, shuffle: bool) -> None:
        if source.size == 0:
            raise UserError("The training data has no prompts; correct data.train.")
        self._source, self._seed, self._shuffle = source, seed, shuffle
        self._position = 0
        self._order_epoch = -1
        self._order: list[int] = []

    def next_batch(self, count: int) -> list[Prompt]:
        """The next `count` prompts; a batch may span epochs."""
        batch = [self._prompt(position) for position in range(self._position, self._position + count)]
        self._position += count
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The cursor and the identity of what it points into."""
        return {"position": self._position, "order": self._order_key()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises UserError if it belongs to other data, another seed or order."""
        if state["order"] != self._order_key():
            raise UserError(
                "The checkpoint's prompt cursor belongs to other training data, another seed or another order; "
                "restore the data and seed settings of that run, or start a new one."
            )
        self._position = state["position"]

    def _order_key(self) -> str:
        shuffled = self._shuffle and self._source.size is not None
        return f"{self._source.fingerprint} {f'shuffled by {self._seed}' if shuffled else 'in order'}"

    def _prompt(self, position: int) -> Prompt:
        size = self._source.size
        if size is None:
            row = position
        else:
            epoch, row = divmod(position, size)
            if row == 0 and epoch > 0:
                logger.info("Epoch %d of the %d training prompts begins.", epoch + 1, size)
            if self._shuffle:
                row = self._epoch_order(epoch, size)[row]
        text, answer, tokens = self._source.row(row)
        return Prompt(index=position, text=text, answer=answer, tokens=tokens)

    def _epoch_order(self, epoch: int, size: int) -> list[int]:
        if epoch != self._order_epoch:
            self._order = list(range(size))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
            self._order_epoch = epoch
        return self._order


def encode_prompts(tokenizer: Any, texts: Sequence[str], chat_template: bool) -> list[tuple[int, ...]]:
    """Prompt tokens of each text: as one user message in the tokenizer's chat template, or as plain text.

    Raises:
        UserError: a chat template is asked for and the tokenizer has none.
    """
    if not texts:
        return []
    if not chat_template:
        return [tuple(tokens) for tokens in tokenizer(list(texts)).input_ids]
    if tokenizer.chat_template is None:
        raise UserError(
            "data.chat_template=true, but the tokenizer has no chat template; set data.chat_template=false."
        )
    messages = [[{"role": "user", "content": text}] for text in texts]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    # the template writes the special tokens itself
    return [tuple(tokens) for tokens in tokenizer(rendered, add_special_tokens=False).input_ids]


def make_prompts(
    config: DataConfig, tokenizer: Any, max_prompt_tokens: int, eval_prompts: int, seed: int
) -> tuple[PromptStream, list[Prompt]]:
    """The training stream and the first `eval_prompts` held-out prompts (0: none are read).

    Prompts of more than `max_prompt_tokens` tokens are left out of files, with their number in a warning; the built-in
    task is refused if its longest prompt would not fit. Held-out prompts are numbered from 0.

    Raises:
        UserError: any fault of the data settings or files.
    """
    train: PromptSource
    held_out: PromptSource
    if config.kind == "chain_sums":
        task = ChainSums.from_config(config, seed)
        _check_longest(task, config, tokenizer, max_prompt_tokens)
        train = ChainSumsSource(task, "train", tokenizer, config.chat_template)
        held_out = ChainSumsSource(task, "eval", tokenizer, config.chat_template)
    elif config.kind == "files":
        if not config.train:
            raise UserError("data.kind=files needs data.train=[FILE, ...] (JSONL or Parquet).")
        if eval_prompts and not config.eval:
            raise UserError("Evaluation needs data.eval=[FILE, ...]; set it, or trainer.eval_every=0.")
        train = _file_source(config.train, config, tokenizer, max_prompt_tokens)
        held_out = _file_source(config.eval, config, tokenizer, max_prompt_tokens) if eval_prompts else ListSource([])
    else:
        raise UserError(f"data.kind={config.kind} is unknown; choose chain_sums or files.")
    count = eval_prompts if held_out.size is None else min(eval_prompts, held_out.size)
    return PromptStream(train, seed, config.shuffle), [Prompt(i, *held_out.row(i)) for i in range(count)]


def _file_source(paths: Sequence[str], config: DataConfig, tokenizer: Any, max_prompt_tokens: int) -> ListSource:
    rows = read_files(paths, config.prompt_column, config.answer_column)
    tokens = encode_prompts(tokenizer, [prompt for prompt, _ in rows], config.chat_template)
    kept = [(*row, ids) for row, ids in zip(rows, tokens, strict=True) if len(ids) <= max_prompt_tokens]
    names = ", ".join(paths)
    limit = f"more than rollout.max_prompt_tokens={max_prompt_tokens} tokens"
    if not kept:
        raise UserError(f"All {len(rows)} prompts of {names} have {limit}; raise it.")
    if len(kept) < len(rows):
        logger.warning(
            "Skipped %d of %d prompts of %s: they have %s (the longest has %d).",
            *(len(rows) - len(kept), len(rows), names, limit, max(map(len, tokens))),
        )
    return ListSource(kept)


def _check_longest(task: ChainSums, config: DataConfig, tokenizer: Any, max_prompt_tokens: int) -> None:
    longest = len(encode_prompts(tokenizer, [task.longest_prompt()], config.chat_template)[0])
    if longest > max_prompt_tokens:
        raise UserError(
            f"A chain of data.max_terms={task.max_terms} terms has up to {longest} prompt tokens, more than "
            f"rollout.max_prompt_tokens={max_prompt_tokens}; raise it or lower data.max_terms."
        )
