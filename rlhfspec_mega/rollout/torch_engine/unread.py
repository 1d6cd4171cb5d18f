"""Accepted tokens that the draft has not read yet, with the target's hidden states that it takes as input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from rlhfspec_mega.compiled import compiled
from rlhfspec_mega.planning.tree import STEPS_KEPT, Bools, Ints

NOBODY = -1  # number of a slot whose sample is not followed


class Features:
    """A tap (`models.transformer.Tap`) that keeps the target's hidden states that the draft takes as input.

    Args:
        layers: layers whose outputs are kept; a layer may be listed twice.
    """

    def __init__(self, layers: tuple[int, ...]) -> None:
        self._layers = layers
        self._outputs: dict[int, torch.Tensor] = {}

    def __call__(self, layer: int, output: torch.Tensor) -> None:
        if layer in self._layers:
            self._outputs[layer] = output

    def outputs(self) -> list[torch.Tensor]:
        """Of each layer of `layers` its output [tokens, hidden] in the last forward pass."""
        return [self._outputs[layer] for layer in self._layers]


class _Step(NamedTuple):
    """The new tokens of one step, n in all, sample by sample.

    Attributes:
        states: of each tapped layer the target's outputs [inputs, hidden], as its pass has put them out.
        taken: [inputs], the inputs whose states belong to the tokens; None: all of them.
        tokens: [n].
        numbers, places, counts: [batch] of each sample its number, its unread tokens before the step, and its new ones.
    """

    states: list[torch.Tensor]
    taken: Bools | None
    tokens: Ints
    numbers: Ints
    places: Ints
    counts: Ints


class Unread:
    """The unread tokens of each slot's sample.

    What a step adds is written down as it comes, and put in order when somebody asks for it: while nothing is drafted,
    following the samples takes next to no time.

    Args:
        most: unread tokens that a slot can hold.
        width: features of a token.

    Attributes:
        following: number of slots whose samples are followed.
        longest: at least the largest of `counts`.
        counts: int64 on the host [slots], unread tokens; 0 for slots that are not followed.
        features: [slots, most, width], of the first counts[i] tokens of slot i, once `gather` was called.
        tokens: int64 [slots, most], the same.
    """

    def __init__(self, slots: int, most: int, width: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.features = torch.zeros(slots, most, width, dtype=dtype, device=device)
        self.tokens = torch.zeros(slots, most, dtype=torch.int64, device=device)
        self.counts = np.zeros(slots, np.int64)
        self.following = self.longest = 0
        self._numbers = np.full(slots, NOBODY)
        self._given = 0  # numbers so far
        self._steps: list[_Step] = []
        self._most_inputs, self._inputs = STEPS_KEPT * slots, 0  # of these steps

    def begin(self, slot: int, features: torch.Tensor, tokens: Sequence[int]) -> None:
        """Follow the sample in a slot, whose last tokens are unread; `features` [n, width] are theirs."""
        self.end(slot)
        self.following += 1
        self._numbers[slot], self._given = self._given, self._given + 1
        self.counts[slot] = count = len(features)
        self.longest = max(self.longest, count)
        if count:
            self.features[slot, :count] = features
            self.tokens[slot, :count] = torch.tensor(tokens[len(tokens) - count :], device=self.tokens.device)

    def end(self, slot: int) -> None:
        """Follow the sample in a slot no more."""
        if self._numbers[slot] != NOBODY:
            self.following -= 1
        self._numbers[slot], self.counts[slot] = NOBODY, 0
        if not self.following:
            self.longest = 0

    def followed(self, batch: int) -> np.ndarray:
        """bool [batch], whether the samples of the first slots are followed."""
        return self._numbers[:batch] != NOBODY

    def move(self, source: int, target: int) -> None:
        """The sample in slot `source` goes on in slot `target`."""
        self.end(target)
        if self._numbers[source] == NOBODY:
            return
        count = int(self.counts[source])
        if count:
            for values in (self.features, self.tokens):
                values[target, :count] = values[source, :count]
        for array in (self.counts, self._numbers):
            array[target] = array[source]
        self.following += 1
        self.end(source)

    def add(self, states: list[torch.Tensor], taken: Bools | None, tokens: Ints, counts: Ints) -> None:
        """Add a step's new tokens, counts[i] of the sample in slot i; see _Step.

        Args:
            states: of each tapped layer the target's outputs [inputs, hidden].
        """
        if self._inputs + len(states[0]) > self._most_inputs:
            self.gather()
        numbers, places, self.longest = _added(self._numbers, self.counts, counts)
        self._steps.append(_Step(states, taken, tokens, numbers, places, counts))
        self._inputs += len(states[0])

    def gather(self) -> None:
        """Put the tokens of all steps so far in their places; those of samples that have ended are dropped."""
        if not self._steps:
            return
        steps, self._steps, self._inputs = self._steps, [], 0
        kept, slots, columns = _destinations(
            _joined([step.numbers for step in steps]),
            _joined([step.places for step in steps]),
            _joined([step.counts for step in steps]),
            self._numbers,
        )
        if not len(kept):
            return
        tokens = _joined([step.tokens for step in steps])[kept]
        taken = _inputs_of(steps)
        rows, places, inputs, new = self._on_device(slots, columns, kept if taken is None else taken[kept], tokens)
        layers = zip(*(step.states for step in steps), strict=True)
        width = self.features.shape[2] // len(steps[0].states)
        for number, outputs in enumerate(layers):
            states = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
            self.features[rows, places, number * width : (number + 1) * width] = states[inputs]
        self.tokens[rows, places] = new

    def take(self, rows: Ints, columns: Ints, counts: Ints) -> tuple[torch.Tensor, torch.Tensor]:
        """The first counts[i] tokens of slot i, which are read now; all in all [N], and their features [N, width].

        Args:
            rows, columns: [N] the slot of each, and its number among those of the slot.
        """
        found = self._newest(counts)
        if found is None:
            self.gather()
            at = self._on_device(rows, columns)
            found = self.tokens[at], self.features[at]
        self._drop_first(counts)
        return found

    def _newest(self, counts: Ints) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What `take` gives, where that is all that the last step has added, and nothing else waits.

        So it is in every step while drafting goes on: to put the tokens in their places first takes twice as long.
        """
        if len(self._steps) != 1:
            return None
        step = self._steps[0]
        if not _are_all(step.numbers, step.places, step.counts, self._numbers, counts):
            return None
        self._steps, self._inputs = [], 0
        (tokens,) = self._on_device(step.tokens)
        states = step.states
        if step.taken is not None and not step.taken.all():
            (inputs,) = self._on_device(np.flatnonzero(step.taken))
            states = [outputs[inputs] for outputs in states]
        return tokens, torch.cat(states, dim=1)

    def _drop_first(self, counts: Ints) -> None:
        """Forget the first counts[i] tokens of slot i, which were read; no step waits any more."""
        batch = slice(len(counts))
        self.counts[batch] -= counts
        self.longest = int(self.counts.max())
        for slot in np.flatnonzero((self.counts[batch] > 0) & (counts > 0)):
            left = int(self.counts[slot])
            for values in (self.features, self.tokens):
                values[slot, :left] = values[slot, counts[slot] : counts[slot] + left].clone()

    def _on_device(self, *arrays: Ints) -> tuple[torch.Tensor, ...]:
        return tuple(torch.from_numpy(array).to(self.tokens.device) for array in arrays)


def _joined(arrays: list[Ints]) -> Ints:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _inputs_of(steps: list[_Step]) -> Ints | None:
    """Of each token its input, counted through all steps; None if all inputs have one."""
    if all(step.taken is None for step in steps):
        return None
    all_of = [np.ones(len(step.states[0]), np.bool_) if step.taken is None else step.taken for step in steps]
    return np.flatnonzero(np.concatenate(all_of))


@compiled
def _added(numbers: Ints, counts: Ints, new: Ints) -> tuple[Ints, Ints, int]:
    """Add new[i] to the count of slot i, if its sample is followed; returns what both were, and the largest count."""
    batch, longest = len(new), 0
    before = numbers[:batch].copy(), counts[:batch].copy()
    for slot in range(batch):
        if numbers[slot] != NOBODY:
            counts[slot] += new[slot]
            longest = max(longest, counts[slot])
    return before[0], before[1], longest


@compiled
def _are_all(numbers: Ints, places: Ints, counts: Ints, own: Ints, wanted: Ints) -> bool:
    """Whether a step has added the first wanted[i] tokens of slot i, and no others; see `_destinations`."""
    if len(numbers) != len(wanted):
        return False
    for slot in range(len(numbers)):
        if numbers[slot] == NOBODY or numbers[slot] != own[slot] or places[slot] or counts[slot] != wanted[slot]:
            return False
    return True


@compiled
def _destinations(numbers: Ints, places: Ints, counts: Ints, own: Ints) -> tuple[Ints, Ints, Ints]:
    """Of the tokens of samples that still have a slot: the token, the slot and the place in it.

    Args:
        numbers, places, counts: of each step and sample; see _Step.
        own: number of the sample that each slot has now.
    """
    # Every kind of sorting takes seconds to compile: one is used everywhere.
    order = np.argsort(own, kind="mergesort")
    ordered, total = own[order], counts.sum()
    kept, slots, columns = np.empty(total, np.int64), np.empty(total, np.int64), np.empty(total, np.int64)
    token = found = 0
    for one in range(len(numbers)):
        at = np.searchsorted(ordered, numbers[one])
        there = numbers[one] != NOBODY and at < len(own) and ordered[at] == numbers[one]
        for further in range(counts[one]):
            if there:
                kept[found], slots[found], columns[found] = token, order[at], places[one] + further
                found += 1
            token += 1
    return kept[:found], slots[:found], columns[:found]
