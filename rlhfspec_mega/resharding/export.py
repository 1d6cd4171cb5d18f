"""One rank's side of resharding: its Megatron shards, or full tensors that it holds, leave bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from rlhfspec_mega.megatron.model import MegatronModel
from rlhfspec_mega.megatron.weights import MappedParameter, mapped_parameters, merge_parameter
from rlhfspec_mega.resharding.buckets import Bucket, checksum, pack
from rlhfspec_mega.resharding.transport import Sender


class Senders:
    """Sending ends of transports, by the name of a stream of weights."""

    def __init__(self) -> None:
        self._senders: dict[str, Sender] = {}

    def connect(self, stream: str, address: Any, owner: int) -> None:
        """Make one, in place of the last one of this name."""
        if stream in self._senders:
            self._senders[stream].close()
        self._senders[stream] = address.sender(owner)

    def get(self, stream: str) -> Sender | None:
        """None on ranks that send nothing."""
        return self._senders.get(stream)


class WeightExporter:
    """Merges what a bucket asks for over the tensor-parallel group; the group's first rank sends it.

    A rank never holds more than the bucket and one merged parameter beyond its own shards.
    """

    def __init__(self, model: MegatronModel) -> None:
        self._model = model
        self._by_name: dict[str, MappedParameter] = {
            name: mapped
            for mapped in mapped_parameters(model.chunks, model.shape)
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
            RunError: the transport failed.
            Exception: the first of any kind (memory ran out, say), only after all gathers, so that no other rank waits
                in one.
        """
        self._last_names = []  # weights have changed since the last update
        sums: dict[int, int] = {}
        buffer: torch.Tensor | None = None
        failure: Exception | None = None
        for bucket in buckets:
            names = iter(bucket.names)
            if sender is not None and failure is None:
                try:
                    if buffer is None:
                        size = max(bucket.bytes for bucket in buckets)
                        buffer = torch.empty(size, dtype=torch.uint8, device=self._model.device)
                    flat = pack(bucket, self._merged(names), buffer)
                    sums[bucket.id] = checksum(flat)
                    sender.send(bucket, flat)
                except Exception as error:
                    failure = error
            for name in names:  # not taken by `pack`: only takes part in the gathers
                try:
                    self._gather(name)
                except Exception as error:
                    failure = failure or error
        self._last.clear()
        if failure is not None:
            raise failure
        return sums

    def _merged(self, names: Iterator[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors of these names, on the group's first rank."""
        for name in names:
            self._gather(name)
            yield name, self._last[name]

    def _gather(self, name: str) -> None:
        """Bring the tensor of this name into `_last` on the group's first rank; collective over the group.

        A parameter is gathered once, also when its tensors (Q, K and V of one `linear_qkv`) or the parts of a large one
        fall into several buckets: the last one gathered is kept. Every rank of the group follows the same order.
        """
        if name not in self._last_names:
            mapped = self._by_name[name]
            self._last.clear()
            self._last_names = mapped.hf_names  # also if merging fails here: the other ranks do not gather it again
            self._last.update(merge_parameter(mapped, self._model.shape, self._model.groups.tp) or {})


def send_tensors(tensors: Mapping[str, torch.Tensor], buckets: Sequence[Bucket], sender: Sender) -> dict[int, int]:
    """Send buckets of full tensors, which this rank holds, in order; {bucket id: checksum}.

    Raises RunError when the transport failed or a tensor is not there.
    """
    device = next(iter(tensors.values())).device
    buffer = torch.empty(max(bucket.bytes for bucket in buckets), dtype=torch.uint8, device=device)
    sums: dict[int, int] = {}
    for bucket in buckets:
        flat = pack(bucket, ((name, tensors[name]) for name in bucket.names), buffer)
        sums[bucket.id] = checksum(flat)
        sender.send(bucket, flat)
    return sums
