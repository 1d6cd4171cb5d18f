"""One actor rank's side of resharding: Megatron shards become full Hugging Face tensors, bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from rlhfspec_mega.actor.actor import Actor
from rlhfspec_mega.actor.weights import MappedParameter, mapped_parameters, merge_parameter
from rlhfspec_mega.errors import RunError
from rlhfspec_mega.resharding.buckets import Bucket, checksum, pack
from rlhfspec_mega.resharding.transport import Sender


class WeightExporter:
    """Merges what a bucket asks for over the tensor-parallel group; the group's first rank sends it.

    A rank never holds more than the bucket and one merged parameter beyond its own shards.
    """

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._by_name: dict[str, MappedParameter] = {
            name: mapped
            for mapped in mapped_parameters(actor.chunks, actor.shape)
            if not mapped.is_tied_copy
            for name in mapped.hf_names
        }

        self._last: dict[str, torch.Tensor] = {}
        self._last_names: list[str] = []

    def names(self) -> list[str]:
        """Hugging Face names of the tensors that this pipeline stage holds."""
        return list(self._by_name)

    def send(self, buckets: Sequence[Bucket], sender: Sender | None) -> dict[int, int]:
        """Merge and send buckets of this stage in order; collective over its tensor-parallel group.

        Args:
            sender: the transport's end on the group's first rank, None on the others.

        Returns:
            {bucket id: checksum} on the first rank, empty on the others.

        Raises:
            RunError: the transport failed; only after all gathers, so that no other rank waits in one.
        """
        self._last_names = []  # weights have changed since the last update
        sums: dict[int, int] = {}
        size = max(bucket.bytes for bucket in buckets)
        buffer = torch.empty(size if sender else 0, dtype=torch.uint8, device=self._actor.device)
        failure: RunError | None = None
        for bucket in buckets:
            merged = self._merged(bucket)
            if sender is None or failure is not None:
                for _ in merged:
                    pass  # only takes part in the gathers
                continue
            flat = pack(bucket, merged, buffer)
            sums[bucket.id] = checksum(flat)
            try:
                sender.send(bucket, flat)
            except RunError as error:
                failure = error
        self._last.clear()
        if failure is not None:
            raise failure
        return sums

    def _merged(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors in the bucket's order (nothing on ranks but the first).

        A parameter is gathered once, also when its tensors (Q, K and V of one `linear_qkv`) or the parts of a large one
        fall into several buckets: the last one gathered is kept. Every rank of the group follows the same order.
        """
        for name in bucket.names:
            if name not in self._last_names:
                mapped = self._by_name[name]
                self._last.clear()
                self._last.update(merge_parameter(mapped, self._actor.shape) or {})
                self._last_names = mapped.hf_names
            if name in self._last:
                yield name, self._last[name]
