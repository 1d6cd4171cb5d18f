"""The draft beside the actor: one rank holds it and trains it on hidden states from the actor's log-prob passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file

import rlhfspec_mega.megatron.quick_start  # noqa: F401
from rlhfspec_mega.draft.directory import load_draft, load_target_ids
from rlhfspec_mega.draft.distillation import state_of, weights_of
from rlhfspec_mega.draft.refresh import DraftLearning, Refresher, RefreshReport
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.megatron.checkpoint_files import SavedPart
from rlhfspec_mega.megatron.checkpoint_writer import WriteFailed, write_beside
from rlhfspec_mega.megatron.features import has_draft, recorded_features
from rlhfspec_mega.megatron.model import MegatronModel, on_megatron
from rlhfspec_mega.megatron.weights import embedding_and_head
from rlhfspec_mega.rl.microbatch import MicroBatch

CHECKPOINT_FILE = "draft.safetensors"
_TAPS, _TARGET_IDS = "taps", "target_ids"


StagedDraft = Callable[[], dict[str, torch.Tensor]] | None  # None on the ranks that do not hold the draft


class ActorDraft:
    """One rank's part of the draft: every rank of the actor creates one, and all ranks call its methods together.

    Args:
        model: the actor.
        path: directory of the initial draft.
        learning: None: the draft does not learn, and no hidden states are recorded.

    Attributes:
        model: the actor.
    """

    def __init__(self, model: MegatronModel, path: Path, learning: DraftLearning | None) -> None:
        self.model, self._learning = model, learning
        self._is_here = has_draft(model.groups)
        self._shape, weights = load_draft(path, model.shape)
        self._target_ids = load_target_ids(path, self._shape)
        self._still: dict[str, torch.Tensor] = (
            weights if self._is_here else {}
        )  # weights of a draft that does not learn
        self._refresher: Refresher | None = None
        if self._is_here and learning is not None:
            self._refresher = Refresher(self._shape, weights, learning, model.device, self._target_ids)

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Current weights by DraftModel.tensors() names, on the rank that holds the draft; {} elsewhere."""
        return self._still if self._refresher is None else self._refresher.tensors()

    @contextmanager
    def learning_from(self, batches: Sequence[MicroBatch], refresh_follows: bool) -> Iterator[None]:
        """Record hidden states of the actor's forward-only pass over `batches`, which runs inside this context.

        Args:
            refresh_follows: a refresh takes place before the next pass; a draft that learns from the last pass alone
                records only passes for which this is true.
        """
        if self._learning is None or (self._learning.recent_only and not refresh_follows):
            yield
            return
        model, most = self.model, self._learning.buffer_tokens
        with recorded_features(model.chunks, model.groups, batches, self._shape.taps, most) as examples:
            yield
        if self._refresher is not None:
            self._refresher.add(examples)

    @on_megatron
    def refresh(self, steps: int | None, seconds: float | None) -> RefreshReport | None:
        """Train for a number of steps or of seconds towards the actor's current weights.

        Returns the report on the draft's rank.
        """
        vocabulary = embedding_and_head(self.model.chunks, self.model.shape, self.model.groups)
        if self._refresher is None or vocabulary is None:
            return None
        return self._refresher.refresh(*vocabulary, steps=steps, seconds=seconds)

    def stage(self, copy: bool) -> StagedDraft:
        """The draft's state for `write`, copied to host memory if it may change before."""
        if not self._is_here or not copy:
            return self._state if self._is_here else None
        try:
            state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._state().items()}
        except Exception as error:  # out of memory: `write` reports it on all ranks
            failure = error

            def fail() -> dict[str, torch.Tensor]:
                raise failure

            return fail
        return lambda: state

    def write(self, staged: StagedDraft, directory: Path) -> SavedPart:
        """Add the draft to a written checkpoint of the actor; in any thread, after MegatronModel.write.

        Returns this rank's files, or on every rank why it failed.
        """
        try:
            return SavedPart(write_beside(staged, directory, CHECKPOINT_FILE, self.model.saving_groups), None)
        except WriteFailed as error:
            return SavedPart({}, str(error))

    def _state(self) -> dict[str, torch.Tensor]:
        """The draft's state, with what its weights refer to: the tapped layers and the tokens of its head's rows."""
        learnt = state_of(self._still) if self._refresher is None else self._refresher.state_dict()
        return learnt | self._meaning()

    def _meaning(self) -> dict[str, torch.Tensor]:
        taps = {_TAPS: torch.tensor(self._shape.taps)}
        return taps if self._target_ids is None else taps | {_TARGET_IDS: self._target_ids}

    def load(self, directory: Path) -> None:
        """Restore the draft of a checkpoint; a checkpoint without one leaves the initial draft.

        Raises UserError for a draft of other sizes, layers or tokens.
        """
        file = directory / CHECKPOINT_FILE
        if not self._is_here or not file.exists():
            return
        state = load_file(file, device=str(self.model.device))
        weights = weights_of(state)
        meaning = {name: state[name].cpu() for name in (_TAPS, _TARGET_IDS) if name in state}
        same_sizes = _shapes(weights) == _shapes(self.weights())
        if not same_sizes or _listed(meaning) != _listed(self._meaning()):
            raise UserError(
                f"The draft in {file} has other {'layers or tokens' if same_sizes else 'sizes'} than the one this run "
                "starts from: resume with the speculation.draft_model_path the run was started with, as it was then."
            )
        if self._refresher is None:
            self._still = weights
        else:
            self._refresher.load_state_dict(state)


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _listed(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    return {name: tensor.tolist() for name, tensor in tensors.items()}
