"""An engine's side of resharding: buckets arrive, are checked and written into the engine's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.resharding.buckets import Bucket, checksum, unpack
from rlhfspec_mega.resharding.transport import Receiver
from rlhfspec_mega.rollout.protocol import RolloutEngine
from rlhfspec_mega.types import TensorInfo, WeightTarget


class WeightReceiver:
    """Loads what comes over a transport into an engine; it goes live only with the engine's `end_update`.

    Args:
        device: where the engine's weights are; buckets are brought there whole, and summed up there.
    """

    def __init__(self, engine: RolloutEngine, device: str) -> None:
        self._engine, self._device = engine, device
        self._receiver: Receiver | None = None

    def connect(self, address: Any, index: int) -> None:
        """Make the receiving end of a transport in place of the last one."""
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = address.receiver(index)

    def receive(
        self, version: int, tensors: Sequence[TensorInfo], buckets: Sequence[Bucket], target: WeightTarget
    ) -> dict[int, int]:
        """Load all buckets: {bucket id: checksum of what arrived}. Raises RunError before `connect`."""
        if self._receiver is None:
            raise RunError("An engine was asked for weights before it was connected to a transport.")
        self._engine.begin_update(version, tensors, target)
        sums: dict[int, int] = {}
        for bucket in buckets:
            data = self._receiver.receive(bucket).to(self._device)
            sums[bucket.id] = checksum(data)
            self._engine.update_weights(unpack(bucket, data))
        return sums
