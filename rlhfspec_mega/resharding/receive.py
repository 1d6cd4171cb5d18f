"""An engine's side of resharding: buckets arrive, are checked and written into the engine's weights."""

from __future__ import annotations

from collections.abc import Sequence

from rlhfspec_mega.resharding.buckets import Bucket, checksum, unpack
from rlhfspec_mega.resharding.transport import Receiver
from rlhfspec_mega.rollout.protocol import RolloutEngine
from rlhfspec_mega.types import TensorInfo, WeightTarget


def receive_weights(
    engine: RolloutEngine,
    receiver: Receiver,
    version: int,
    tensors: Sequence[TensorInfo],
    buckets: Sequence[Bucket],
    target: WeightTarget,
    device: str = "cpu",
) -> dict[int, int]:
    """Load all buckets into an engine; the weights go live only with its `end_update`, after the sums were compared.

    Args:
        device: where the engine's weights are; buckets are brought there whole, and summed up there.

    Returns:
        {bucket id: checksum of what arrived}.
    """
    engine.begin_update(version, tensors, target)
    sums: dict[int, int] = {}
    for bucket in buckets:
        data = receiver.receive(bucket).to(device)
        sums[bucket.id] = checksum(data)
        engine.update_weights(unpack(bucket, data))
    return sums
