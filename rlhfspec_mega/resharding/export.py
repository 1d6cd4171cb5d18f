"""A rank's side of resharding: merges its Megatron shards into full tensors and sends them bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from rlhfspec_mega.megatron.model import MegatronModel
from rlhfspec_mega.megatron.weights import MappedParameter, mapped_parameters, merge_parameter
from rlhfspec_mega.resharding.buckets import Bucket, checksum, pack
from rlhfspec_mega.resharding.transport import Sender


class Senders:
    """Sending ends of transports, by stream name."""

    def __init__(self) -> None:
        self._senders: dict[str, Sender] = {}

    def connect(self, stream: str, address: Any, owner: int) -> None:
        """Create one; replaces an earlier one of this name."""
        if stream in self._senders:
            self._senders[stream].close()
        self._senders[stream] = address.sender(owner)

    def get(self, stream: str) -> Sender | None:
        """The sending end of this name; None on ranks that send nothing."""
        return self._senders.get(stream)


class WeightExporter:
    """Merges tensors over the tensor-parallel group and sends them from the group's first rank.

    A rank holds at most one bucket and one merged parameter beyond its own shards.
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
            {bucket id: checksum} on the first rank, {} on the others.

        Raises:
            RunError: the transport failed.
            Exception: any other error (e.g. out of memory), raised only after all gathers, so that no other rank hangs.
        """
        self._last_names = []  # its weights have changed since the last update
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
            for name in names:  # ranks that do not pack only take part in the gathers
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
        """Gather the tensor of this name into `_last` on the group's first rank; collective over the group.

        A parameter is gathered once even if its tensors (Q, K and V of one `linear_qkv`), or the parts of a large one,
        fall
        into several buckets: the last parameter is kept. All ranks of the group gather in the same order.
        """
        if name not in self._last_names:
            mapped = self._by_name[name]
            self._last.clear()
            self._last_names = mapped.hf_names  # even if merging fails here: the other ranks do not gather it again
            self._last.update(merge_parameter(mapped, self._model.shape, self._model.groups.tp) or {})


def send_tensors(tensors: Mapping[str, torch.Tensor], buckets: Sequence[Bucket], sender: Sender) -> dict[int, int]:
    """Send buckets of full tensors that this rank holds, in order; returns {bucket id: checksum}.

    Raises RunError if the transport failed or a tensor is missing.
    """
    device = next(iter(tensors.values())).device
    buffer = torch.empty(max(bucket.bytes for bucket in buckets), dtype=torch.uint8, device=device)
    sums: dict[int, int] = {}
    for bucket in buckets:
        flat = pack(bucket, ((name, tensors[name]) for name in bucket.names), buffer)
        sums[bucket.id] = checksum(flat)
        sender.send(bucket, flat)
    return sums
