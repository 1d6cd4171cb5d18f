"""The newest examples within a number of tokens, every so manieth held out, and batches of the others."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence

from rlhfspec_mega.drafting.example import DraftExample

HELD_OUT_EVERY = 8
_JUDGED_TOKENS = 8192  # measuring costs time that training could use
_SORTED = 512  # examples sorted by length together: batches of like lengths waste little, and still differ by epoch


class ExampleBuffer:
    """Bounded in tokens; the oldest examples leave first. Which are held out depends on their number alone."""

    def __init__(self, tokens: int):
        self._limit, self._tokens, self.added = tokens, 0, 0
        self._examples: deque[tuple[int, DraftExample]] = deque()

    def add(self, examples: Sequence[DraftExample]) -> None:
        """Append those with at least one token to predict."""
        for example in examples:
            if example.predicted:
                self._examples.append((self.added, example))
                self._tokens += len(example.tokens)
                self.added += 1
        while self._tokens > self._limit and len(self._examples) > 1:
            self._tokens -= len(self._examples.popleft()[1].tokens)

    def __len__(self) -> int:
        return len(self._examples)

    @property
    def held_out(self) -> list[DraftExample]:
        """The newest held-out examples: what a draft is judged by."""
        chosen, tokens = [], 0
        for number, example in reversed(self._examples):
            if _is_held_out(number) and tokens < _JUDGED_TOKENS:
                chosen.append(example)
                tokens += len(example.tokens)
        return chosen

    @property
    def learnt_from(self) -> list[DraftExample]:
        return [example for number, example in self._examples if not _is_held_out(number)]


def _is_held_out(number: int) -> bool:
    return number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1


def batches(examples: Sequence[DraftExample], tokens: int, rng: random.Random) -> list[list[DraftExample]]:
    """One epoch of batches in random order.

    Args:
        tokens: of a batch with its examples padded to equal length, at most (a longer example goes alone).
    """
    order = list(examples)
    rng.shuffle(order)
    made = []
    for start in range(0, len(order), _SORTED):
        batch: list[DraftExample] = []
        for example in sorted(order[start : start + _SORTED], key=lambda example: len(example.tokens)):
            if batch and (len(batch) + 1) * len(example.tokens) > tokens:
                made.append(batch)
                batch = []
            batch.append(example)
        made.append(batch)
    rng.shuffle(made)
    return made


def endless_batches(examples: Sequence[DraftExample], tokens: int, rng: random.Random) -> Iterator[list[DraftExample]]:
    """Batches of one epoch after another; nothing without examples."""
    while examples:
        yield from batches(examples, tokens, rng)
