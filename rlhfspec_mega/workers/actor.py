"""The worker of role actor: an actor rank and its side of resharding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlhfspec_mega.actor.actor import Actor
from rlhfspec_mega.actor.rendezvous import ParallelRanks, Rendezvous
from rlhfspec_mega.config.schema import ActorConfig
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.resharding.buckets import Bucket
from rlhfspec_mega.resharding.export import WeightExporter
from rlhfspec_mega.resharding.transport import Sender


class ActorWorker(Actor):
    """An Actor that also sends its weights; arguments as Actor's.

    Args:
        deterministic: refuse operations whose result depends on timing (torch.use_deterministic_algorithms).
    """

    def __init__(
        self,
        shape: ModelShape,
        config: ActorConfig,
        rendezvous: Rendezvous,
        deterministic: bool = False,
        **settings: Any,
    ) -> None:
        torch.use_deterministic_algorithms(deterministic)
        super().__init__(shape, config, rendezvous, **settings)
        self._exporter = WeightExporter(self)
        self._senders: dict[str, Sender] = {}

    def grid_position(self) -> ParallelRanks:
        """Where this rank stands in the TP x PP x DP grid."""
        return self.ranks

    def weight_names(self) -> list[str]:
        """Hugging Face names of the tensors of this pipeline stage."""
        return self._exporter.names()

    def connect(self, stream: str, address: Any, owner: int) -> None:
        """Make the sending end of a transport under the name `stream`, in place of the last one of this name."""
        if stream in self._senders:
            self._senders[stream].close()
        self._senders[stream] = address.sender(owner)

    def send_weights(self, stream: str, buckets: Sequence[Bucket]) -> dict[int, int]:
        """Send this stage's buckets; checksums on the stage's first tensor-parallel rank."""
        return self._exporter.send(buckets, self._senders.get(stream))
