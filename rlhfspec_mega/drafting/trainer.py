"""Keeps a draft fresh: a buffer of recent samples, refreshes of bounded effort, kept only if the draft got better."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhfspec_mega.drafting.buffer import ExampleBuffer, endless_batches
from rlhfspec_mega.drafting.example import DraftExample, make_batch
from rlhfspec_mega.drafting.initialize import initial_draft
from rlhfspec_mega.drafting.learner import DraftLearner, Target, measured_batches, weights_of
from rlhfspec_mega.errors import RunError
from rlhfspec_mega.models.draft_shape import DraftShape

_REFRESHES = "refreshes"
_MEASURED_SHARE = 1 / 8  # of the seconds, for each of the two measurements


@dataclass(frozen=True)
class RefreshReport:
    """What a refresh did.

    Attributes:
        before, after: expected accepted length (of learner.STEPS draft tokens) on the held-out examples, of the old and
            the newly trained weights; None where all are of one prompt and nothing is held out.
        steps, seconds: of training; the seconds include the two measurements.
        examples: in the buffer, held-out ones included.
    """

    kept: bool
    before: float | None
    after: float | None
    steps: int
    seconds: float
    examples: int


class _Budget:
    """Time for pieces of work of much the same length; without `seconds` it is endless."""

    def __init__(self, seconds: float | None):
        self._last = time.monotonic()
        self._end = math.inf if seconds is None else self._last + seconds

    def another(self) -> bool:
        """Asked after each piece: whether there is time for another one that takes as long."""
        before, self._last = self._last, time.monotonic()
        return 2 * self._last - before <= self._end


class DraftTrainer:
    """Trains in float32 on `device`, from `load`ed weights or, without a load, from a new draft's.

    Args:
        buffer_tokens: most tokens of the examples that are kept.
        temperature: the samples'.
        target_ids: int64 [draft vocabulary], target token of each draft token; needed where that is reduced.
        batch_tokens: of one training step, padding included; see buffer.batches for longer examples.
    """

    def __init__(
        self,
        shape: DraftShape,
        *,
        buffer_tokens: int,
        learning_rate: float,
        temperature: float,
        device: torch.device | str,
        seed: int,
        target_ids: Tensor | None = None,
        batch_tokens: int = 512,
    ):
        if (target_ids is None) != (shape.vocab_size == shape.target.vocab_size):
            raise RunError("A draft is trained with target ids exactly if its vocabulary is reduced.")
        self._shape, self._device, self._seed, self._temperature = shape, device, seed, temperature
        self._ids = None if target_ids is None else target_ids.to(device)
        self._learning_rate, self._batch_tokens = learning_rate, batch_tokens
        self._buffer = ExampleBuffer(buffer_tokens)
        self._learner: DraftLearner | None = None
        self._target: Target | None = None
        self._refreshes = 0

    def set_target(self, embedding: Tensor, head: Tensor) -> None:
        """The target's weights of now, [vocab, hidden] each; copied."""
        self._target = Target(embedding.to(self._device), head.to(self._device), self._ids, self._temperature)
        if self._learner is None:
            self.load(initial_draft(self._shape, self._target.draft_head, self._seed))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Start from these weights, by DraftModel.tensors() names, with a new optimizer."""
        weights = {name: tensor.to(self._device) for name, tensor in tensors.items()}
        self._learner = DraftLearner(self._shape, weights, self._learning_rate)

    def add(self, examples: Sequence[DraftExample]) -> None:
        """Add to the buffer; the oldest leave first."""
        self._buffer.add(examples)

    def refresh(
        self, *, steps: int | None, seconds: float | None, progress: Callable[[int], None] = lambda taken: None
    ) -> RefreshReport:
        """Train until `steps` or `seconds` (one at least) are used up; keep the new weights only if they are better.

        At least one step is taken, however few the seconds; none where all examples are of one prompt.

        Args:
            progress: is told the steps taken, after each.

        Raises RunError before the first weights of the target.
        """
        if self._learner is None or self._target is None:
            raise RunError("A draft cannot be refreshed before it has weights and a target.")
        if steps is None and seconds is None:
            raise RunError("A refresh needs a number of steps or seconds.")
        learner, begin = self._learner, time.monotonic()
        measured, old = measured_batches(self._buffer.held_out), learner.state_dict()
        if not measured:
            return RefreshReport(False, None, None, 0, time.monotonic() - begin, len(self._buffer))
        lengths = self._accepted(measured, _Budget(None if seconds is None else seconds * _MEASURED_SHARE))
        before, measuring = float(torch.cat(lengths).mean()), time.monotonic() - begin
        # Measuring takes as long again after the training.
        taken = self._train(steps, None if seconds is None else seconds - 2 * measuring, progress)
        after = float(torch.cat(self._accepted(measured[: len(lengths)], _Budget(None))).mean())
        if not (kept := after > before):
            learner.load_state_dict(old)
        self._refreshes += 1
        return RefreshReport(kept, before, after, taken, time.monotonic() - begin, len(self._buffer))

    def _accepted(self, measured: Sequence[Sequence[DraftExample]], budget: _Budget) -> list[Tensor]:
        """Expected accepted lengths of the first batches, as many as the budget allows, but of one at least."""
        assert self._learner is not None and self._target is not None
        lengths = []
        for batch in measured:
            lengths.append(self._learner.accepted_lengths(self._target, batch))
            if not budget.another():
                break
        return lengths

    def _train(self, steps: int | None, seconds: float | None, progress: Callable[[int], None]) -> int:
        """Number of steps taken, one at least."""
        assert self._learner is not None and self._target is not None
        budget, taken = _Budget(seconds), 0
        rng = random.Random(f"{self._seed}/{self._refreshes}")
        for batch in endless_batches(self._buffer.learnt_from, self._batch_tokens, rng):
            self._learner.step(self._target, make_batch(batch, self._device))
            taken += 1
            progress(taken)
            if taken == steps or not budget.another():
                break
        return taken

    def tensors(self) -> dict[str, Tensor]:
        """The weights of now, float32 by DraftModel.tensors() names; empty before there are any."""
        return {} if self._learner is None else {n: t.detach().clone() for n, t in self._learner.weights.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Weights, optimizer and counter, flat; not the buffer, which fills again."""
        learnt = {} if self._learner is None else self._learner.state_dict()
        return learnt | {_REFRESHES: torch.tensor(self._refreshes)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` returned, or begin from its weights alone; the buffer is kept as it is."""
        if weights := weights_of(state):
            self.load(weights)
            if _REFRESHES in state:
                assert self._learner is not None
                self._learner.load_state_dict(state)
        self._refreshes = int(state.get(_REFRESHES, 0))
