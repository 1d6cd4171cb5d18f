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
    """The most probable nodes of each sample of a step, being copied to the host.

    Args:
        survival: float32 [B, M], descending.
        places: int64 [B, M], place of each node among all drafted ones, layer by layer: the first layer has `branches`
            nodes, each later one `branches` squared.
    """

    def __init__(self, survival: Tensor, places: Tensor, branches: int) -> None:
        self._survival = survival.to("cpu", non_blocking=True)
        self._places = places.to("cpu", non_blocking=True)
        self._branches, self._copied = branches, None
        if survival.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return survival and depth (from 1), both [B, M]; does not wait if the step's result has arrived."""
        if self._copied is not None:
            self._copied.synchronize()
        later = (self._places.numpy() - self._branches) // self._branches**2
        return self._survival.numpy(), np.maximum(later + 2, 1)


class NodeScores:
    """Buffers for the nodes' scores at fixed addresses, since CUDA graphs write them.

    Args:
        rows: most requests of a batch.
        nodes: number of nodes kept per request.
    """

    def __init__(self, device: torch.device | str, rows: int, nodes: int) -> None:
        self._survival = torch.zeros(rows, nodes, device=device)
        self._places = torch.zeros(rows, nodes, dtype=torch.int64, device=device)

    def keep(self, scores: Sequence[Any]) -> None:
        """Keep the most probable nodes of each sample.

        Args:
            scores: SGLang's scores of each layer, [B, nodes drafted from, branches].
        """
        flat = torch.cat([*scores], dim=1).flatten(1)
        best = flat.topk(min(self._survival.shape[1], flat.shape[1]), dim=-1)
        batch, found = best.values.shape
        self._survival[:batch].zero_()
        self._survival[:batch, :found] = best.values
        self._places[:batch, :found] = best.indices

    def nodes(self, batch: int, branches: int, ranks: Any = None) -> Nodes:
        """Return the nodes of the last drafted step.

        Args:
            ranks: SGLang's tensor-parallel group; all ranks get the first rank's values, so that they decide alike.
        """
        survival, places = self._survival[:batch], self._places[:batch]
        if ranks is not None and ranks.world_size > 1:
            ranks.broadcast(survival, src=0)
            ranks.broadcast(places, src=0)
        return Nodes(survival, places, branches)
