"""Accepted tokens that the draft has not read yet, with the target's hidden states that it takes as input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from rlhfspec_mega.planning.tree import STEPS_KEPT, Bools, Ints
from rlhfspec_mega.rollout.torch_engine.cache import number_in_row

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
        states: [inputs, features].
        taken: [inputs], the inputs whose states belong to the tokens; None: all of them.
        tokens: [n].
        numbers, places, counts: [batch] of each sample its number, its unread tokens before the step, and its new ones.
    """

    states: torch.Tensor
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
        counts: int64 on the host [slots], unread tokens; 0 for slots that are not followed.
        features: [slots, most, width], of the first counts[i] tokens of slot i, once `gather` was called.
        tokens: int64 [slots, most], the same.
    """

    def __init__(self, slots: int, most: int, width: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.features = torch.zeros(slots, most, width, dtype=dtype, device=device)
        self.tokens = torch.zeros(slots, most, dtype=torch.int64, device=device)
        self.counts = np.zeros(slots, np.int64)
        self.following = 0
        self._numbers = np.full(slots, NOBODY)
        self._given = 0  # numbers so far
        self._steps: list[_Step] = []
        self._log = torch.zeros(STEPS_KEPT * slots, width, dtype=dtype, device=device)  # their states
        self._inputs = 0  # of these steps

    def begin(self, slot: int, features: torch.Tensor, tokens: Sequence[int]) -> None:
        """Follow the sample in a slot, whose last tokens are unread; `features` [n, width] are theirs."""
        self.end(slot)
        self.following += 1
        self._numbers[slot], self._given = self._given, self._given + 1
        self.counts[slot] = count = len(features)
        if count:
            self.features[slot, :count] = features
            self.tokens[slot, :count] = torch.tensor(tokens[len(tokens) - count :], device=self.tokens.device)

    def end(self, slot: int) -> None:
        """Follow the sample in a slot no more."""
        if self._numbers[slot] != NOBODY:
            self.following -= 1
        self._numbers[slot], self.counts[slot] = NOBODY, 0

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
        batch, inputs = len(counts), len(states[0])
        if self._inputs + inputs > len(self._log):
            self.gather()
        place = self._log[self._inputs : self._inputs + inputs]
        kept = torch.cat(states, dim=-1, out=place if len(place) == inputs else None)
        numbers = self._numbers[:batch].copy()
        self._steps.append(_Step(kept, taken, tokens, numbers, self.counts[:batch].copy(), counts))
        self.counts[:batch] += counts * (numbers != NOBODY)
        self._inputs += inputs

    def gather(self) -> None:
        """Put the tokens of all steps so far in their places; those of samples that have ended are dropped."""
        if not self._steps:
            return
        steps, self._steps, self._inputs = self._steps, [], 0
        numbers = np.concatenate([np.repeat(step.numbers, step.counts) for step in steps])
        places = [np.repeat(s.places, s.counts) + number_in_row(_rows(s.counts)) for s in steps]
        order = np.argsort(self._numbers, kind="stable")
        slots = order[np.minimum(np.searchsorted(self._numbers[order], numbers), len(order) - 1)]
        kept = np.flatnonzero((self._numbers[slots] == numbers) & (numbers != NOBODY))
        if not len(kept):
            return
        tokens = np.concatenate([step.tokens for step in steps])[kept]
        rows, columns, from_steps, new = self._on_device(slots[kept], np.concatenate(places)[kept], kept, tokens)
        self.features[rows, columns] = torch.cat([_taken(step.states, step.taken) for step in steps])[from_steps]
        self.tokens[rows, columns] = new

    def drop_first(self, counts: Ints) -> None:
        """Forget the first counts[i] tokens of slot i, which were read; after `gather`."""
        batch = slice(len(counts))
        self.counts[batch] -= counts
        for slot in np.flatnonzero((self.counts[batch] > 0) & (counts > 0)):
            left = int(self.counts[slot])
            for values in (self.features, self.tokens):
                values[slot, :left] = values[slot, counts[slot] : counts[slot] + left].clone()

    def _on_device(self, *arrays: Ints) -> tuple[torch.Tensor, ...]:
        return tuple(torch.from_numpy(array).to(self.tokens.device) for array in arrays)


def _rows(counts: Ints) -> Ints:
    return np.repeat(np.arange(len(counts)), counts)


def _taken(states: torch.Tensor, taken: Bools | None) -> torch.Tensor:
    return states if taken is None else states[torch.from_numpy(taken).to(states.device)]
