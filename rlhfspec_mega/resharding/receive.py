"""An engine's side of resharding: receives buckets, computes their checksums and loads them into the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.resharding.buckets import Bucket, checksum, unpack
from rlhfspec_mega.resharding.transport import Receiver
from rlhfspec_mega.rollout.protocol import RolloutEngine
from rlhfspec_mega.types import TensorInfo, WeightTarget


class WeightReceiver:
    """Loads received buckets into an engine; the weights become live with the engine's `end_update`.

    Args:
        device: device of the engine's weights; buckets are copied there before checksums are computed.
    """

    def __init__(self, engine: RolloutEngine, device: str) -> None:
        self._engine, self._device = engine, device
        self._receiver: Receiver | None = None

    def connect(self, address: Any, index: int) -> None:
        """Create the receiving end of a transport; replaces an earlier one."""
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = address.receiver(index)

    def receive(
        self, version: int, tensors: Sequence[TensorInfo], buckets: Sequence[Bucket], target: WeightTarget
    ) -> dict[int, int]:
        """Load all buckets; returns {bucket id: checksum of what arrived}. Raises RunError before `connect`."""
        if self._receiver is None:
            raise RunError("An engine was asked for weights before it was connected to a transport.")
        self._engine.begin_update(version, tensors, target)
        sums: dict[int, int] = {}
        for bucket in buckets:
            data = self._receiver.receive(bucket).to(self._device)
            sums[bucket.id] = checksum(data)
            self._engine.update_weights(unpack(bucket, data))
        return sums
