"""The driver's side of resharding: one plan of buckets, updates of all engines, and a stream for export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from rlhfspec_mega.cluster.interface import Call, Cluster, WorkerGroup
from rlhfspec_mega.errors import RunError
from rlhfspec_mega.resharding.buckets import Bucket, checksum, plan_buckets, unpack
from rlhfspec_mega.resharding.transport import CollectiveHost, Receiver, SharedMemoryHost
from rlhfspec_mega.types import TensorInfo


class Resharder:
    """Moves the actor's weights to engines, and to this process for export.

    Args:
        tensors: every Hugging Face tensor of the model, in model order, with the dtype to send.
        transport: "shared_memory" (one host) or "collective" (between hosts).
        bucket_bytes: bound of a bucket.
        device: where a collective's buffers lie; "cuda" (NCCL) only if no engine shares a GPU with the actor.
    """

    def __init__(
        self,
        cluster: Cluster,
        actor: WorkerGroup,
        tensors: Sequence[TensorInfo],
        *,
        transport: str,
        bucket_bytes: int,
        deadline_seconds: float,
        device: str = "cpu",
    ) -> None:
        self._cluster, self._actor, self._tensors = cluster, actor, list(tensors)
        self._transport, self._deadline, self._device = transport, deadline_seconds, device
        ranks = actor.call("grid_position", phase="resharding plan")
        self._stage_ranks: dict[int, list[int]] = {}
        for rank, position in enumerate(ranks):
            if position.dp == 0:  # one data-parallel replica sends; in TP order, its first rank is the sender
                self._stage_ranks.setdefault(position.pp, []).append(rank)
        owner: dict[str, int] = {}
        for stage, members in self._stage_ranks.items():
            owner |= dict.fromkeys(actor.call("weight_names", phase="resharding plan", ranks=members[:1])[0], stage)
        missing = [tensor.name for tensor in tensors if tensor.name not in owner]
        if missing:
            raise RunError(f"No pipeline stage of the actor holds {', '.join(missing[:5])}.")
        self.buckets = plan_buckets(self._tensors, owner.__getitem__, bucket_bytes)
        self._hosts: list[SharedMemoryHost | CollectiveHost] = []

    def connect(self, engines: WorkerGroup) -> None:
        """Open the transport between all senders and these engines; once, before the first `update`."""
        address = self._open_host(engines.size, self._device)
        calls = [engines.start(rank, "connect", address, rank) for rank in range(engines.size)]
        self._cluster.wait([*calls, *self._connect_senders("engines", address)], "resharding connect")

    def update(self, engines: WorkerGroup, version: int) -> None:
        """Give all engines the actor's weights of now as `version`.

        Raises:
            RunError: an engine's checksum of a bucket differs (named with its tensors), a worker failed or went silent.
        """
        arguments = ("receive_weights", version, self._tensors, self.buckets)
        receives = [engines.start(rank, *arguments) for rank in range(engines.size)]
        sent = self._send("engines", receives)
        self._cluster.wait(receives, "reshard")
        for call in receives:
            self._compare(sent, call.result(), f"engine {call.rank}", version)
        engines.call("end_update", version, phase="reshard")

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor on CPU) of the actor's weights; holds one unfinished tensor at a time.

        Every tensor is valid until the next is asked for.
        """
        address = self._open_host(1, "cpu")
        calls = self._connect_senders("export", address)
        receiver: Receiver = address.receiver(0)  # a collective's ends wait for each other
        self._cluster.wait(calls, "export")
        try:
            for stage, buckets in self._by_stage():
                calls = self._start_sending("export", stage, buckets)
                sums: dict[int, int] = {}
                yield from self._assemble(receiver, buckets, sums)
                self._cluster.wait(calls, "export")
                self._compare(calls[0].result(), sums, "this process", None)
        finally:
            receiver.close()

    def close(self) -> None:
        for host in self._hosts:
            host.close()

    def _open_host(self, receivers: int, device: str) -> Any:
        size = max(bucket.bytes for bucket in self.buckets)
        host: SharedMemoryHost | CollectiveHost
        if self._transport == "shared_memory":
            host = SharedMemoryHost(size, receivers, self._deadline)
        else:
            host = CollectiveHost("127.0.0.1", max(self._stage_ranks) + 1, receivers, size, self._deadline, device)
        self._hosts.append(host)
        return host.address

    def _connect_senders(self, stream: str, address: Any) -> list[Call]:
        return [
            self._actor.start(members[0], "connect", stream, address, stage)
            for stage, members in self._stage_ranks.items()
        ]

    def _by_stage(self) -> list[tuple[int, list[Bucket]]]:
        return [(stage, [b for b in self.buckets if b.owner == stage]) for stage in sorted(self._stage_ranks)]

    def _start_sending(self, stream: str, stage: int, buckets: list[Bucket]) -> list[Call]:
        return [self._actor.start(rank, "send_weights", stream, buckets) for rank in self._stage_ranks[stage]]

    def _send(self, stream: str, receives: Sequence[Call]) -> dict[int, int]:
        """Let the stages send one after the other; a failing receiver ends the wait at once."""
        sums: dict[int, int] = {}
        for stage, buckets in self._by_stage():
            sends = self._start_sending(stream, stage, buckets)
            while not all(call.done for call in sends):
                pending = [call for call in [*sends, *receives] if not call.done]
                self._cluster.wait(pending, "reshard", first=True)
            sums |= sends[0].result()
        return sums

    def _assemble(
        self, receiver: Receiver, buckets: Sequence[Bucket], sums: dict[int, int]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        shapes = {tensor.name: tensor.shape for tensor in self._tensors}
        partial: dict[str, torch.Tensor] = {}
        for bucket in buckets:
            data = receiver.receive(bucket)
            sums[bucket.id] = checksum(data)
            for name, start, values in unpack(bucket, data):
                size = prod(shapes[name])
                if values.numel() < size:  # a tensor larger than a bucket: its parts come in order
                    whole = partial.setdefault(name, torch.empty(size, dtype=values.dtype))
                    whole[start : start + values.numel()] = values.cpu()
                    if start + values.numel() < size:
                        continue
                    values = partial.pop(name)
                yield name, values.cpu().view(shapes[name])

    def _compare(self, sent: Mapping[int, int], received: Mapping[int, int], who: str, version: int | None) -> None:
        wrong = [bucket for bucket in self.buckets if bucket.id in sent and sent[bucket.id] != received.get(bucket.id)]
        if version is not None and sent.keys() != received.keys():
            raise RunError(f"In phase 'reshard', {who} did not confirm every bucket of policy version {version}.")
        if wrong:
            names = "; ".join(f"bucket {bucket.id} ({', '.join(bucket.names)})" for bucket in wrong)
            raise RunError(f"In phase 'reshard', the weights that {who} received differ from those sent: {names}.")
