"""Keeps a draft fresh.

A buffer of recent samples, and refreshes of bounded effort that are kept only if the draft improved.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhfspec_mega.draft.buffer import Buffer, endless_batches
from rlhfspec_mega.draft.distillation import Learner, Target, accepted_lengths, measured_batches
from rlhfspec_mega.draft.examples import Example
from rlhfspec_mega.draft.shape import DraftShape
from rlhfspec_mega.errors import RunError

_BATCH_TOKENS = 512  # of one training step, padding included; see buffer.batches for longer examples
_REFRESHES = "refreshes"
_MEASURED_SHARE = 1 / 8  # of the seconds, for each of the two measurements


@dataclass(frozen=True)
class DraftLearning:
    """How a draft is trained in a run; plain data that the driver uses, too.

    Attributes:
        buffer_tokens: most tokens, with their hidden states, that the buffer of recent samples holds.
        temperature: sampling temperature of the samples.
        recent_only: learn only from the samples added last: a checkpoint does not restore a longer memory.
    """

    buffer_tokens: int
    learning_rate: float
    temperature: float
    seed: int
    recent_only: bool


@dataclass(frozen=True)
class RefreshReport:
    """Result of a refresh.

    Attributes:
        before, after: expected accepted length (of distillation.STEPS draft tokens) on the held-out examples, of the
            old and the newly trained weights; None if all examples are of one prompt, so that none are held out.
        steps, seconds: of training; the seconds include the two measurements.
        examples: number in the buffer, held-out ones included.
    """

    kept: bool
    before: float | None
    after: float | None
    steps: int
    seconds: float
    examples: int


class _Budget:
    """Time for pieces of work of similar length; unlimited without `seconds`."""

    def __init__(self, seconds: float | None):
        self._last = time.monotonic()
        self._end = math.inf if seconds is None else self._last + seconds

    def another(self) -> bool:
        """Return whether the remaining time suffices for another piece of work like the previous one.

        Call it after each.
        """
        before, self._last = self._last, time.monotonic()
        return 2 * self._last - before <= self._end


class Refresher:
    """A draft that learns in float32 on `device` from the samples it is given.

    Args:
        weights: initial weights by DraftModel.tensors() names; copied.
        target_ids: int64 [draft vocabulary], target token of each draft token; None: the whole vocabulary.
    """

    def __init__(
        self,
        shape: DraftShape,
        weights: Mapping[str, Tensor],
        learning: DraftLearning,
        device: torch.device | str,
        target_ids: Tensor | None,
    ):
        self._shape, self._learning, self._device = shape, learning, device
        self._ids = None if target_ids is None else target_ids.to(device)
        placed = {name: tensor.to(device) for name, tensor in weights.items()}
        self._learner = Learner(shape, placed, learning.learning_rate)
        self._buffer = Buffer(learning.buffer_tokens)
        self._refreshes = 0

    def add(self, examples: Sequence[Example]) -> None:
        """Add examples to the buffer; the oldest ones leave first."""
        if self._learning.recent_only:
            self._buffer = Buffer(self._learning.buffer_tokens)
        self._buffer.add(examples)

    def refresh(
        self,
        embedding: Tensor,
        head: Tensor,
        *,
        steps: int | None,
        seconds: float | None,
        progress: Callable[[int], None] = lambda taken: None,
    ) -> RefreshReport:
        """Train until `steps` or `seconds` (one of them must be given) are used up.

        Keep the new weights only if they are better.

        At least one step is taken, however few the seconds; none if all examples are of one prompt.

        Args:
            embedding, head: the target's current ones, [vocab, hidden] each.
            progress: called with the number of steps taken, after each.

        Raises RunError without either limit.
        """
        if steps is None and seconds is None:
            raise RunError("A refresh needs a number of steps or seconds.")
        learner, begin = self._learner, time.monotonic()
        target = Target(embedding.to(self._device), head.to(self._device), self._ids, self._learning.temperature)
        measured, old = measured_batches(self._buffer.held_out), learner.state_dict()
        if not measured:
            return RefreshReport(False, None, None, 0, time.monotonic() - begin, len(self._buffer))
        lengths = self._accepted(target, measured, None if seconds is None else seconds * _MEASURED_SHARE)
        before, measuring = float(torch.cat(lengths).mean()), time.monotonic() - begin
        # Measuring takes as long again after the training.
        taken = self._train(target, steps, None if seconds is None else seconds - 2 * measuring, progress)
        after = float(torch.cat(self._accepted(target, measured[: len(lengths)], None)).mean())
        if not (kept := after > before):
            learner.load_state_dict(old)
        self._refreshes += 1
        return RefreshReport(kept, before, after, taken, time.monotonic() - begin, len(self._buffer))

    def _accepted(self, target: Target, measured: Sequence[Sequence[Example]], seconds: float | None) -> list[Tensor]:
        """Expected accepted lengths of the first batches: as many as time allows, but at least one."""
        budget, lengths = _Budget(seconds), []
        for batch in measured:
            lengths.append(accepted_lengths(self._shape, self._learner.weights, target, batch)[:, -1])
            if not budget.another():
                break
        return lengths

    def _train(self, target: Target, steps: int | None, seconds: float | None, progress: Callable[[int], None]) -> int:
        """Returns the number of steps taken, at least one."""
        budget, taken = _Budget(seconds), 0
        rng = random.Random(f"{self._learning.seed}/{self._refreshes}")
        for batch in endless_batches(self._buffer.learnt_from, _BATCH_TOKENS, rng):
            self._learner.step(target, batch)
            taken += 1
            progress(taken)
            if taken == steps or not budget.another():
                break
        return taken

    def tensors(self) -> dict[str, Tensor]:
        """Return float32 copies of the current weights, by the names that DraftModel.tensors() uses."""
        return {name: tensor.detach().clone() for name, tensor in self._learner.weights.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Weights, optimizer and counter, flat; not the buffer, which fills again."""
        return self._learner.state_dict() | {_REFRESHES: torch.tensor(self._refreshes)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned, or its weights alone; the buffer is kept."""
        self._learner.load_state_dict(state)
        self._refreshes = int(state.get(_REFRESHES, 0))
