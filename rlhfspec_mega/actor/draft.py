"""The draft beside the actor: one rank holds it and trains it on the hidden states of the actor's log-prob passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rlhfspec_mega.actor.checkpoint_files import FileSum
from rlhfspec_mega.actor.checkpoint_writer import write_beside
from rlhfspec_mega.actor.draft_learning import DraftLearning
from rlhfspec_mega.actor.features import has_draft, recorded_features
from rlhfspec_mega.actor.weights import embedding_and_head
from rlhfspec_mega.algorithm.microbatch import MicroBatch
from rlhfspec_mega.drafting.learner import weights_of
from rlhfspec_mega.drafting.trainer import DraftTrainer, RefreshReport
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.draft_directory import load_draft, load_target_ids
from rlhfspec_mega.models.shape import ModelShape

CHECKPOINT_FILE = "draft.safetensors"


class ActorDraft:
    """One rank's part in it: every rank of the actor makes one, and all call its methods together.

    Args:
        chunks: the actor's model.
        path: directory of the draft to start from.
        learning: None: the draft stays as it is, and nothing is recorded.
    """

    def __init__(
        self, chunks: list[Any], shape: ModelShape, path: Path, learning: DraftLearning | None, device: torch.device
    ) -> None:
        self._chunks, self._target, self._learning, self._device = chunks, shape, learning, device
        self._shape, weights = load_draft(path, shape)
        self._target_ids = load_target_ids(path, self._shape)
        self._start: dict[str, torch.Tensor] = weights if has_draft() else {}
        self._trainer: DraftTrainer | None = None
        if has_draft() and learning is not None:
            self._trainer = self._new_trainer(learning)
            self._trainer.load(weights)

    def _new_trainer(self, learning: DraftLearning) -> DraftTrainer:
        return DraftTrainer(
            self._shape,
            buffer_tokens=learning.buffer_tokens,
            learning_rate=learning.learning_rate,
            temperature=learning.temperature,
            device=self._device,
            seed=learning.seed,
            target_ids=self._target_ids,
        )

    def weights(self) -> Mapping[str, torch.Tensor]:
        """The weights of now by DraftModel.tensors() names, on the rank that has them; empty elsewhere."""
        return self._start if self._trainer is None else self._trainer.tensors()

    @contextmanager
    def learning_from(self, batches: Sequence[MicroBatch]) -> Iterator[None]:
        """Keep the hidden states of the actor's own forward-only pass over `batches`, which runs inside."""
        if self._learning is None:
            yield
            return
        with recorded_features(self._chunks, batches, self._shape.taps, self._learning.buffer_tokens) as examples:
            yield
        if self._trainer is not None:
            if self._learning.recent_only:
                self._forget(self._learning)
            self._trainer.add(examples)

    def _forget(self, learning: DraftLearning) -> None:
        """Go on as after a checkpoint was loaded: with weights, optimizer and counters, but without samples."""
        assert self._trainer is not None
        state = self._trainer.state_dict()
        self._trainer = self._new_trainer(learning)
        self._trainer.load_state_dict(state)

    def refresh(self, steps: int | None, seconds: float | None) -> RefreshReport | None:
        """Train so many steps, or for so long, towards the actor's weights of now; the report where the draft is."""
        vocabulary = embedding_and_head(self._chunks, self._target)
        if self._trainer is None or vocabulary is None:
            return None
        self._trainer.set_target(*vocabulary)
        return self._trainer.refresh(steps=steps, seconds=seconds)

    def save(self, directory: Path) -> dict[str, FileSum]:
        """Add the draft, if it learns, to a written checkpoint of the actor; this rank's files.

        Raises WriteFailed on every rank when it cannot be written.
        """
        state = None if self._trainer is None else self._trainer.state_dict()
        return write_beside(state, directory, CHECKPOINT_FILE)

    def load(self, directory: Path) -> None:
        """Go on with a checkpoint's draft; a checkpoint without one leaves the start draft.

        Raises UserError for a draft of other sizes.
        """
        file = directory / CHECKPOINT_FILE
        if self._trainer is None or not file.exists():
            return
        state = load_file(file, device=str(self._device))
        if _shapes(weights_of(state)) != _shapes(self._start):
            raise UserError(
                f"The draft in {file} has other sizes than the one this run starts from: resume with the drafting.path "
                "that the run was started with."
            )
        self._trainer.load_state_dict(state)


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}
