"""The frozen reference on the actor's own ranks: its weights wait in host memory and are swapped in to score."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class ReferenceWeights:
    """A host copy of this rank's weights, taken when the object is made."""

    def __init__(self, chunks: list[Any]) -> None:
        self._chunks = chunks
        self._frozen = self._copy()

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        for chunk in self._chunks:
            yield from chunk.parameters()

    def _copy(self) -> list[torch.Tensor]:
        return [parameter.detach().to("cpu", copy=True) for parameter in self._parameters()]

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model computes with the reference's weights inside; the actor's come back bitwise, also on errors."""
        current = self._copy()
        self._write(self._frozen)
        try:
            yield
        finally:
            self._write(current)

    def _write(self, values: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self._parameters(), values, strict=True):
                parameter.copy_(value)
