"""Keeps a draft fresh: a buffer of recent samples, refreshes of bounded effort, kept only if the draft got better."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhfspec_mega.drafting.buffer import ExampleBuffer, endless_batches
from rlhfspec_mega.drafting.example import DraftExample, make_batch
from rlhfspec_mega.drafting.initialize import initial_draft
from rlhfspec_mega.drafting.learner import DraftLearner, Target, weights_of
from rlhfspec_mega.errors import RunError
from rlhfspec_mega.models.draft_shape import DraftShape

_REFRESHES, _ADDED = "refreshes", "examples_added"


@dataclass(frozen=True)
class RefreshReport:
    """What a refresh did.

    Attributes:
        before, after: expected accepted length (of learner.STEPS draft tokens) on the held-out examples, of the old and
            the newly trained weights.
        steps, seconds: of training; the seconds include the two measurements.
        examples: in the buffer, held-out ones included.
    """

    kept: bool
    before: float
    after: float
    steps: int
    seconds: float
    examples: int


class DraftTrainer:
    """Trains in float32 on `device`, from `load`ed weights or, without a load, from a new draft's.

    Args:
        buffer_tokens: most tokens of the examples that are kept.
        temperature: the samples'.
        target_ids: int64 [draft vocabulary], target token of each draft token; needed where that is reduced.
        batch_tokens: of one training step, padding included.
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

    def refresh(self, *, steps: int | None, seconds: float | None) -> RefreshReport:
        """Train until `steps` or `seconds` (one at least) are used up; keep the new weights only if they are better.

        Raises RunError before the first weights of the target.
        """
        if self._learner is None or self._target is None:
            raise RunError("A draft cannot be refreshed before it has weights and a target.")
        if steps is None and seconds is None:
            raise RunError("A refresh needs a number of steps or seconds.")
        learner, target, begin = self._learner, self._target, time.monotonic()
        held_out, old = self._buffer.held_out, learner.state_dict()
        before = learner.accepted(target, held_out)
        measuring = time.monotonic() - begin  # as long again after the training
        rng = random.Random(f"{self._seed}/{self._refreshes}")
        taken = 0
        for batch in endless_batches(self._buffer.learnt_from, self._batch_tokens, rng):
            if taken == steps or (seconds is not None and time.monotonic() - begin + measuring >= seconds):
                break
            learner.step(target, make_batch(batch, self._device))
            taken += 1
        after = learner.accepted(target, held_out)
        if not (kept := after > before):
            learner.load_state_dict(old)
        self._refreshes += 1
        return RefreshReport(kept, before, after, taken, time.monotonic() - begin, len(self._buffer))

    def tensors(self) -> dict[str, Tensor]:
        """The weights of now, float32 by DraftModel.tensors() names; empty before there are any."""
        return {} if self._learner is None else {n: t.detach().clone() for n, t in self._learner.weights.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Weights, optimizer and counters, flat; not the buffer, which fills again."""
        learnt = {} if self._learner is None else self._learner.state_dict()
        return learnt | {_REFRESHES: torch.tensor(self._refreshes), _ADDED: torch.tensor(self._buffer.added)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` returned; the buffer is kept as it is."""
        if learnt := {name: tensor for name, tensor in state.items() if name not in (_REFRESHES, _ADDED)}:
            if self._learner is None:
                self.load(weights_of(learnt))
            assert self._learner is not None
            self._learner.load_state_dict(learnt)
        self._refreshes, self._buffer.added = int(state[_REFRESHES]), int(state[_ADDED])
