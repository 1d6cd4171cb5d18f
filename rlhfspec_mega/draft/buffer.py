"""A buffer of the newest examples: some prompts' are held out, and batches are made of the others."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections import deque
from collections.abc import Iterator, Sequence

from rlhfspec_mega.draft.examples import LOOKAHEAD, Example

_HELD_OUT_EVERY = 8  # one prompt in this many is held out
_JUDGED_TOKENS = 8192  # limit of held-out tokens, since measuring takes time from training
_SORTED = 512  # examples sorted by length together: batches of like lengths waste little, and still differ by epoch
_SCORE_BYTES = 8


class Buffer:
    """The newest examples within a limit of tokens; the oldest leave first.

    Samples of one prompt are alike, so that all or none of them are held out. The prompt's tokens decide: about one
    prompt in eight is held out, at least one, and not all in the buffer.
    """

    def __init__(self, tokens: int):
        self._limit, self._tokens = tokens, 0
        self._examples: deque[tuple[int, Example]] = deque()  # with their prompts' scores

    def add(self, examples: Sequence[Example]) -> None:
        """Append the examples that have at least one token to predict."""
        for example in examples:
            if example.predicted:
                self._examples.append((_score(example), example))
                self._tokens += len(example.tokens)
        while self._tokens > self._limit and len(self._examples) > 1:
            self._tokens -= len(self._examples.popleft()[1].tokens)

    def __len__(self) -> int:
        return len(self._examples)

    @property
    def held_out(self) -> list[Example]:
        """The newest held-out examples, by which a draft is judged; empty if all examples are of one prompt."""
        scores = self._held_out_scores()
        chosen, tokens = [], 0
        for score, example in reversed(self._examples):
            if score in scores and tokens < _JUDGED_TOKENS:
                chosen.append(example)
                tokens += len(example.tokens)
        return chosen

    @property
    def learnt_from(self) -> list[Example]:
        scores = self._held_out_scores()
        return [example for score, example in self._examples if score not in scores]

    def _held_out_scores(self) -> set[int]:
        scores = sorted({score for score, _ in self._examples})
        due = sum(score < 2 ** (8 * _SCORE_BYTES) // _HELD_OUT_EVERY for score in scores)
        return set(scores[: min(max(due, 1), len(scores) - 1)]) if scores else set()


def _score(example: Example) -> int:
    """A hash of the example's prompt, evenly distributed and the same in every run."""
    prompt = repr(example.tokens[: example.prompt_length].tolist())
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=_SCORE_BYTES).digest())


def batches(examples: Sequence[Example], tokens: int, rng: random.Random) -> list[list[Example]]:
    """One epoch of batches in random order.

    Args:
        tokens: most tokens of a batch, with its examples padded to equal length. A longer example is a batch of its
            own; if its tokens to predict times its entries, which attention compares, exceed the square of `tokens`,
            only a random window of its tokens is predicted.
    """
    order = [_window(example, tokens, rng) for example in examples]
    rng.shuffle(order)
    made = []
    for start in range(0, len(order), _SORTED):
        batch: list[Example] = []
        for example in sorted(order[start : start + _SORTED], key=lambda example: len(example.tokens)):
            if batch and (len(batch) + 1) * len(example.tokens) > tokens:
                made.append(batch)
                batch = []
            batch.append(example)
        made.append(batch)
    rng.shuffle(made)
    return made


def _window(example: Example, tokens: int, rng: random.Random) -> Example:
    """Cut the example at the end of a window of its tokens to predict; only the tokens in the window are predicted."""
    size = max(1, tokens**2 // (len(example.tokens) - LOOKAHEAD))
    if example.predicted <= size:
        return example
    end = len(example.tokens) - rng.randrange(example.predicted - size + 1)
    return dataclasses.replace(
        example,
        tokens=example.tokens[:end],
        prompt_length=end - size,
        features=example.features[:end],
        states=example.states[:end],
    )


def endless_batches(examples: Sequence[Example], tokens: int, rng: random.Random) -> Iterator[list[Example]]:
    """Batches of one epoch after another; nothing if there are no examples."""
    while examples:
        yield from batches(examples, tokens, rng)
