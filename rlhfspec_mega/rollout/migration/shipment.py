"""KV on its way to one destination, written in pieces between decode steps."""

from __future__ import annotations

import torch

from rlhfspec_mega.rollout.migration.messages import Piece
from rlhfspec_mega.rollout.migration.staging import Handle, Layout, Staging
from rlhfspec_mega.rollout.migration.wire import Outlet


class SharedShipment:
    """Pieces lie in shared memory; the destination learns of it when the sample comes."""

    def __init__(self, number: int, layout: Layout) -> None:
        self.number = number
        self._staging = Staging.shared(layout)

    @property
    def handle(self) -> Handle | None:
        return self._staging.handle

    def write(self, part: str, first: int, piece: torch.Tensor) -> None:
        """Positions from `first` on: [layers, 2, kv_heads, rows, head_dim]."""
        self._staging.parts[part][:, :, :, first : first + piece.shape[3]] = piece

    def close(self) -> None:
        """Give the memory back: the destination has opened it, or never will."""
        self._staging.close()


class StreamedShipment:
    """Pieces go through the connection into memory of the destination. Writing raises OSError when it is gone."""

    handle: Handle | None = None

    def __init__(self, number: int, layout: Layout, outlet: Outlet) -> None:
        self.number, self._layout, self._outlet = number, layout, outlet

    def write(self, part: str, first: int, piece: torch.Tensor) -> None:
        """As SharedShipment.write."""
        payload = piece.contiguous().cpu().view(torch.uint8).numpy().reshape(-1).data
        self._outlet.send(Piece(self.number, self._layout, part, first, piece.shape[3]), payload)

    def close(self) -> None:
        """Nothing to do: the memory is the destination's."""


Shipment = SharedShipment | StreamedShipment
