"""What an engine's samples have said so far, from which drafts are made without a model."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rlhfspec_mega.compiled import compiled
from rlhfspec_mega.history.propose import Proposed, Wanted, propose
from rlhfspec_mega.history.sizes import PROMPT_END, kept_tokens
from rlhfspec_mega.history.store import NOTHING, ORDERS, Ints, Store, append, empty_store

_AT_ONCE = 1024  # tokens that wait to be stored, about
_BEGUN, _MOVED = -1, -2  # in place of a step's number of samples: a sample begins, or goes on in another slot


class History:
    """Texts of finished samples and of those in slots, indexed by their suffixes.

    Earlier epochs and steps, other members of a group and a sample's own text are all the same to it. What it proposes
    can only make decoding faster or slower: the target decides on every token.

    Args:
        slots: samples decoded at once.
        capacity: tokens that are kept, about; older ones are forgotten. See kept_tokens.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        self._store = empty_store(kept_tokens(capacity, slots))
        self._last = np.full(slots, NOTHING)  # id of each slot's last token
        self._buckets = np.empty(len(ORDERS), np.int64)
        self._prompt: tuple[int, ...] = ()  # the newest one
        # What is not stored yet, in its order; see `_store`. To store every step at once, where nothing is proposed,
        # would take 3% of a plain step of a small model.
        self._tokens: list[int] = []
        self._numbers: list[Ints] = []
        self._kinds: list[int] = []

    def clear(self) -> None:
        """Forget everything, also the samples in slots."""
        self._tokens, self._numbers, self._kinds = [], [], []
        store = self._store
        store.chunks[:] = store.heads[:] = NOTHING  # chains begin at a head
        store.clock[:] = 0
        self._last[:], self._prompt = NOTHING, ()

    def become(self, other: History) -> None:
        """Forget everything and take over the texts of another history of the same sizes, whose slots are empty."""
        self.clear()
        pairs: Iterable[tuple[np.ndarray, np.ndarray]] = zip(self._store, other.of_slots(0)[0], strict=True)
        for own, given in pairs:
            own[:] = given

    def admit(self, slot: int, prompt: Sequence[int], response: Sequence[int]) -> None:
        """Begin a sample in a slot."""
        known = tuple(prompt) == self._prompt
        self._prompt = tuple(prompt)
        text = [*(prompt[-PROMPT_END:] if known else prompt), *response]
        self._wait(_BEGUN, np.array([slot, len(text)]), text)

    def add(self, texts: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Store samples that were decoded elsewhere: prompt and response of each."""
        self._store_all()
        stored = [[*prompt[-PROMPT_END:], *response] for prompt, response in texts]
        tokens = np.fromiter(itertools.chain.from_iterable(stored), np.int64)
        _append(self._store, tokens, np.array([len(text) for text in stored], np.int64), self._buckets)

    def extend(self, tokens: Sequence[int], counts: Ints) -> None:
        """Append a step's tokens, sample by sample: counts[i] of the sample in slot i."""
        self._wait(len(counts), counts, tokens)

    def move(self, source: int, target: int) -> None:
        """The sample in slot `source` goes on in slot `target`."""
        self._wait(_MOVED, np.array([source, target]), ())

    def propose(self, batch: int, most: int, least: float, **wanted: Any) -> Proposed:
        """Draft trees for the samples in the first `batch` slots.

        Args:
            most: nodes of a sample.
            least: survival below which a node is not worth verifying.
            wanted: the other fields of Wanted.
        """
        store, last = self.of_slots(batch)
        rows, parents, depths, tokens, ranks, cells = np.empty((6, batch * most), np.int64)
        result = Proposed(rows, parents, depths, tokens, ranks, cells, np.empty(batch * most))
        size = propose(store, Wanted(last, **wanted), most, least, result)
        return Proposed._make(values[:size] for values in result)

    def of_slots(self, batch: int) -> tuple[Store, Ints]:
        """The store, with all tokens up to now, and the ids of the last tokens of the samples in the first slots."""
        self._store_all()
        return self._store, self._last[:batch]

    def _wait(self, kind: int, numbers: Ints, tokens: Sequence[int]) -> None:
        self._kinds.append(kind)
        self._numbers.append(numbers)
        self._tokens += tokens
        if len(self._tokens) >= _AT_ONCE:
            self._store_all()

    def _store_all(self) -> None:
        if self._kinds:
            tokens, numbers = np.array(self._tokens, np.int64), np.concatenate(self._numbers)
            _store(self._store, self._last, tokens, numbers, np.array(self._kinds), self._buckets)
            self._tokens, self._numbers, self._kinds = [], [], []


@compiled
def _append(store: Store, tokens: Ints, lengths: Ints, buckets: Ints) -> None:
    """Add sequences of so many tokens each."""
    place = 0
    for length in lengths:
        last = NOTHING
        for _ in range(length):
            last = append(store, last, tokens[place], buckets)
            place += 1


@compiled
def _store(store: Store, lasts: Ints, tokens: Ints, numbers: Ints, kinds: Ints, buckets: Ints) -> None:
    """Store what has waited.

    Args:
        tokens: of all, one after the other.
        numbers: of one of `kinds` after the other: of a step how many tokens each sample got; of a sample that begins
            its slot and how many tokens it has; of one that moves its slots before and after.
        kinds: number of samples of a step, _BEGUN or _MOVED.
    """
    place, entry = 0, 0
    for kind in kinds:
        if kind == _MOVED:
            lasts[numbers[entry + 1]] = lasts[numbers[entry]]
        elif kind == _BEGUN:
            slot, last = numbers[entry], NOTHING
            for _ in range(numbers[entry + 1]):
                last = append(store, last, tokens[place], buckets)
                place += 1
            lasts[slot] = last
        for slot in range(kind):
            for _ in range(numbers[entry + slot]):
                lasts[slot] = append(store, lasts[slot], tokens[place], buckets)
                place += 1
        entry += 2 if kind < 0 else kind
