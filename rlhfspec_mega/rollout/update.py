"""Weight updates of an engine: which one is open, what has come of it, and what is refused when."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.types import TensorInfo, WeightTarget

Piece = tuple[str, int, torch.Tensor]  # name, first element in the flattened full tensor, flat values


class WeightUpdate:
    """Writes pieces into the model's tensors and accounts for every element.

    Args:
        version: policy version the pieces belong to.
        announced: the tensors to come. Raises RunError on a name or shape that `targets` does not hold.
        targets: contiguous tensors by Hugging Face name, written in place.
    """

    def __init__(self, version: int, announced: Sequence[TensorInfo], targets: Mapping[str, torch.Tensor]):
        self.version = version
        for info in announced:
            if info.name not in targets:
                raise RunError(f"Update {version} announces {info.name}, which this engine's model does not hold.")
            if tuple(info.shape) != tuple(targets[info.name].shape):
                raise RunError(
                    f"Update {version} announces {info.name} with shape {tuple(info.shape)}; "
                    f"this engine holds {tuple(targets[info.name].shape)}."
                )
        self._flat = {info.name: targets[info.name].view(-1) for info in announced}
        self._written: dict[str, list[tuple[int, int]]] = {name: [] for name in self._flat}

    def write(self, pieces: Sequence[Piece]) -> None:
        """Copy pieces in. Raises RunError on an unannounced name or an overrun."""
        for name, first, values in pieces:
            if name not in self._flat:
                raise RunError(f"Update {self.version} brings {name}, which was not announced.")
            flat, end = self._flat[name], first + values.numel()
            if first < 0 or end > flat.numel():
                raise RunError(
                    f"Update {self.version} writes elements {first} to {end} of {name}, which has {flat.numel()}."
                )
            flat[first:end].copy_(values.view(-1))
            self._written[name].append((first, end))

    def end(self) -> None:
        """All have come. Raises RunError naming tensors with an element that did not, came twice or is not finite."""
        self._check(list(self._flat))

    def _check(self, names: Sequence[str]) -> None:
        wrong = [name for name in names if not _covers(self._written[name], self._flat[name].numel())]
        if wrong:
            raise RunError(f"Update {self.version} did not bring every element exactly once of {_some(wrong)}.")
        if not names:
            return
        ends = torch.stack([torch.stack(self._flat[name].aminmax()) for name in names])  # NaN is both ends
        finite = ends.isfinite().all(dim=1).tolist()
        if wrong := [name for name, good in zip(names, finite, strict=True) if not good]:
            raise RunError(f"Update {self.version} brought NaN or infinity in {_some(wrong)}; training has diverged.")


class UpdatedEngine(ABC):
    """What every engine does about weights: one update is open at a time, and live when it has ended.

    After an error the update stays open, and the engine decodes nothing until another one has succeeded: its weights
    are mixed. Versions of the actor and of its draft are counted apart.
    """

    _version = -1  # of the actor's weights that are live; -1: none have come
    _update: WeightUpdate | None = None
    _updating = WeightTarget.ACTOR

    def begin_update(
        self, version: int, tensors: Sequence[TensorInfo], target: WeightTarget = WeightTarget.ACTOR
    ) -> None:
        """As RolloutEngine says; beginning again discards an unfinished update."""
        if target is WeightTarget.ACTOR:
            self.abandon_draft_update()
        self._update, self._updating = self._begin(version, tensors, target), target

    def update_weights(self, pieces: Sequence[Piece]) -> None:
        """As RolloutEngine says. Raises RunError outside an update, and as `WeightUpdate.write`."""
        self._opened().write(pieces)

    def end_update(self, version: int) -> None:
        update = self._opened()
        if version != update.version:
            raise RunError(f"Update {version} was ended, but update {update.version} was begun.")
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
        """Whether no update is open. Raises RunError before the first weights: there are samples to decode."""
        if self._update is None and self._version < 0:
            raise RunError("The engine has samples but no weights; send it a weight update before polling.")
        return self._update is None

    def _opened(self) -> WeightUpdate:
        if self._update is None:
            raise RunError("Weights came outside an update; call begin_update first.")
        return self._update

    @abstractmethod
    def _begin(self, version: int, tensors: Sequence[TensorInfo], target: WeightTarget) -> WeightUpdate:
        """Where the pieces go. Raises RunError where these tensors cannot be taken, or not now."""

    @abstractmethod
    def _make_live(self, target: WeightTarget) -> None:
        """All that was announced has come: decode with it, and with nothing that was computed by the weights before."""

    @abstractmethod
    def _lose_draft(self) -> None:
        """The draft's weights are mixed until its next update."""


def _some(names: Sequence[str], shown: int = 5) -> str:
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def _covers(spans: Sequence[tuple[int, int]], size: int) -> bool:
    """Whether half-open spans tile [0, size)."""
    firsts, ends = zip(*sorted(spans), strict=True) if spans else ((), ())
    return (*firsts, size) == (0, *ends)
