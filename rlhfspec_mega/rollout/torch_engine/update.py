"""One weight update of an engine: what was announced, what has arrived, what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.types import TensorInfo


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

    def write(self, pieces: Sequence[tuple[str, int, torch.Tensor]]) -> None:
        """Copy (name, first element, flat values) in. Raises RunError on an unannounced name or an overrun."""
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

    def check_complete(self) -> None:
        """Raises RunError naming the tensors of which an element did not come, or came twice."""
        wrong = [name for name, spans in self._written.items() if not _covers(spans, self._flat[name].numel())]
        if wrong:
            raise RunError(f"Update {self.version} did not bring every element exactly once of {_some(wrong)}.")

    def check_finite(self) -> None:
        """Raises RunError naming the tensors that hold NaN or infinity."""
        if not self._flat:
            return
        ends = torch.stack([torch.stack(flat.aminmax()) for flat in self._flat.values()])  # NaN is both ends
        finite = ends.isfinite().all(dim=1).tolist()
        if wrong := [name for name, good in zip(self._flat, finite, strict=True) if not good]:
            raise RunError(f"Update {self.version} brought NaN or infinity in {_some(wrong)}; training has diverged.")


def _some(names: Sequence[str], shown: int = 5) -> str:
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def _covers(spans: Sequence[tuple[int, int]], size: int) -> bool:
    """Whether half-open spans tile [0, size)."""
    end = 0
    for first, last in sorted(spans):
        if first != end:
            return False
        end = last
    return end == size
