"""Weight updates of an engine: the state of the open update, and checks of what is received."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.types import TensorInfo, WeightTarget

Piece = tuple[str, int, torch.Tensor]  # name, first element in the flattened full tensor, flat values


class WeightUpdate:
    """Writes pieces into the model's tensors and checks that every element arrives exactly once.

    Args:
        version: policy version of the weights.
        announced: the tensors of this update.
        targets: contiguous tensors by Hugging Face name, written in place.

    Raises RunError for an announced name or shape that `targets` does not have.
    """

    def __init__(self, version: int, announced: Sequence[TensorInfo], targets: Mapping[str, torch.Tensor]):
        self.version = version
        for info in announced:
            if info.name not in targets:
                raise RunError(f"Update {version} announces {info.name}, which this engine's model does not have.")
            if tuple(info.shape) != tuple(targets[info.name].shape):
                raise RunError(
                    f"Update {version} announces {info.name} with shape {tuple(info.shape)}; "
                    f"this engine's has shape {tuple(targets[info.name].shape)}."
                )
        self._flat = {info.name: targets[info.name].view(-1) for info in announced}
        self._written: dict[str, list[tuple[int, int]]] = {name: [] for name in self._flat}

    def write(self, pieces: Sequence[Piece]) -> None:
        """Copy pieces into the tensors. Raises RunError for a tensor that was not announced or elements outside it."""
        for name, first, values in pieces:
            if name not in self._flat:
                raise RunError(f"Update {self.version} sends {name}, which was not announced.")
            flat, end = self._flat[name], first + values.numel()
            if first < 0 or end > flat.numel():
                raise RunError(
                    f"Update {self.version} writes elements {first} to {end} of {name}, which has {flat.numel()}."
                )
            flat[first:end].copy_(values.view(-1))
            self._written[name].append((first, end))

    def end(self) -> None:
        """Check the whole update. Raises RunError if an element is missing, was sent twice or is not finite."""
        self._check(list(self._flat))

    def _check(self, names: Sequence[str]) -> None:
        wrong = [name for name in names if not _covers(self._written[name], self._flat[name].numel())]
        if wrong:
            raise RunError(f"Update {self.version} did not send every element exactly once of {_some(wrong)}.")
        if not names:
            return
        ends = torch.stack([torch.stack(self._flat[name].aminmax()) for name in names])  # a NaN makes both ends NaN
        finite = ends.isfinite().all(dim=1).tolist()
        if wrong := [name for name, good in zip(names, finite, strict=True) if not good]:
            raise RunError(f"Update {self.version} has NaN or infinity in {_some(wrong)}; training has diverged.")


class UpdatedEngine(ABC):
    """Weight updates as all engines handle them: one update is open at a time, and its weights are used once it ends.

    After an error the update stays open and the engine does not decode until another update has succeeded, because its
    weights are a mixture of two versions. Actor and draft have separate version counters.
    """

    _version = -1  # policy version of the weights in use; -1 before the first update
    _update: WeightUpdate | None = None
    _updating = WeightTarget.ACTOR

    def begin_update(
        self, version: int, tensors: Sequence[TensorInfo], target: WeightTarget = WeightTarget.ACTOR
    ) -> None:
        """See RolloutEngine; a new update replaces an unfinished one."""
        if target is WeightTarget.ACTOR:
            self.abandon_draft_update()
        self._update, self._updating = self._begin(version, tensors, target), target

    def update_weights(self, pieces: Sequence[Piece]) -> None:
        """See RolloutEngine. Raises RunError outside an update, and as `WeightUpdate.write` does."""
        self._opened().write(pieces)

    def end_update(self, version: int) -> None:
        update = self._opened()
        if version != update.version:
            raise RunError(f"The engine was to end weight update {version}, but update {update.version} is open.")
        update.end()
        self._make_live(self._updating)
        self._update = None
        if self._updating is WeightTarget.ACTOR:
            self._version = version

    def abandon_draft_update(self) -> None:
        if self._update is not None and self._updating is WeightTarget.DRAFT:
            self._update = None
            self._lose_draft()

    def _may_decode(self) -> bool:
        """Whether no update is open. Raises RunError before the first update; only called if there are samples."""
        if self._update is None and self._version < 0:
            raise RunError("The engine has samples but no weights; send it a weight update before polling.")
        return self._update is None

    def _opened(self) -> WeightUpdate:
        if self._update is None:
            raise RunError("Weights were sent while no update is open; call begin_update first.")
        return self._update

    @abstractmethod
    def _begin(self, version: int, tensors: Sequence[TensorInfo], target: WeightTarget) -> WeightUpdate:
        """Start an update of these tensors. Raises RunError if the model cannot take them, or not now."""

    @abstractmethod
    def _make_live(self, target: WeightTarget) -> None:
        """Use the new weights, which are complete, and drop what may not outlive the old ones, e.g. cached prefills."""

    @abstractmethod
    def _lose_draft(self) -> None:
        """Decode without the draft until its next update: the one that broke off left weights of two versions."""


def _some(names: Sequence[str], shown: int = 5) -> str:
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def _covers(spans: Sequence[tuple[int, int]], size: int) -> bool:
    """Whether half-open spans tile [0, size)."""
    firsts, ends = zip(*sorted(spans), strict=True) if spans else ((), ())
    return (*firsts, size) == (0, *ends)
