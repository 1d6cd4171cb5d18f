"""Survival probabilities of the nodes of SGLang's draft trees, which the host reads one step later.

Using the probabilities of the current step would make the host wait for the device in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Nodes:
    """The likeliest nodes of each sample of a step, on their way to the host.

    Args:
        survival: float32 [B, M], falling.
        places: int64 [B, M], among all that were drafted: layer by layer, `branches` in the first one, their square in
            each after it.
    """

    def __init__(self, survival: Tensor, places: Tensor, branches: int) -> None:
        self._survival = survival.to("cpu", non_blocking=True)
        self._places = places.to("cpu", non_blocking=True)
        self._branches, self._copied = branches, None
        if survival.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Survival and depth (1 and up), both [B, M]; no wait where the step's result has come."""
        if self._copied is not None:
            self._copied.synchronize()
        later = (self._places.numpy() - self._branches) // self._branches**2
        return self._survival.numpy(), np.maximum(later + 2, 1)


class NodeScores:
    """Buffers that keep their place, as CUDA graphs write them.

    Args:
        rows: requests of a batch, at most.
        nodes: that are kept of each.
    """

    def __init__(self, device: torch.device | str, rows: int, nodes: int) -> None:
        self._survival = torch.zeros(rows, nodes, device=device)
        self._places = torch.zeros(rows, nodes, dtype=torch.int64, device=device)

    def keep(self, scores: Sequence[Any]) -> None:
        """Of SGLang's layers of scores, each [B, nodes drafted from, branches], the likeliest nodes of each sample."""
        flat = torch.cat([*scores], dim=1).flatten(1)
        best = flat.topk(min(self._survival.shape[1], flat.shape[1]), dim=-1)
        batch, found = best.values.shape
        self._survival[:batch].zero_()
        self._survival[:batch, :found] = best.values
        self._places[:batch, :found] = best.indices

    def nodes(self, batch: int, branches: int, ranks: Any = None) -> Nodes:
        """Of the step that was drafted last.

        Args:
            ranks: SGLang's group of tensor-parallel ranks: all get what the first one has, so that they decide alike.
        """
        survival, places = self._survival[:batch], self._places[:batch]
        if ranks is not None and ranks.world_size > 1:
            ranks.broadcast(survival, src=0)
            ranks.broadcast(places, src=0)
        return Nodes(survival, places, branches)
