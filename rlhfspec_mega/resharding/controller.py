"""The driver's side of resharding: bucket plans, weight updates of all engines, and streaming of weights for export."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import closing
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch

from rlhfspec_mega.cluster.interface import Call, Cluster, WorkerGroup
from rlhfspec_mega.cluster.liveness import WorkerState
from rlhfspec_mega.errors import RunError
from rlhfspec_mega.resharding.buckets import Bucket, checksum, plan_buckets, unpack
from rlhfspec_mega.resharding.transport import Host, OpenHost, Receiver
from rlhfspec_mega.types import TensorInfo, WeightTarget

_LOOK_SECONDS = 0.5
_CONNECTABLE = (WorkerState.REJOINING, WorkerState.SERVING)


@dataclass(frozen=True)
class _Plan:
    """All tensors of one target (policy or draft) and the buckets they are sent in."""

    tensors: list[TensorInfo]
    buckets: list[Bucket]

    def by_stage(self) -> list[tuple[int, list[Bucket]]]:
        """Group the target's buckets by the pipeline stage that sends them; stages in ascending order."""
        stages = sorted({bucket.owner for bucket in self.buckets})
        return [(stage, [bucket for bucket in self.buckets if bucket.owner == stage]) for stage in stages]


class WeightSource(Protocol):
    """The ranks that hold the weights, such as workers.model_group.ModelGroup."""

    def senders(self) -> dict[int, list[int]]:
        """Sending ranks by pipeline stage; the first rank of each stage sends for it."""

    def weight_names(self, rank: int, target: WeightTarget) -> list[str]:
        """Names of a target's tensors that a rank's stage holds."""

    def connect(self, rank: int, stream: str, address: Any, owner: int) -> Call:
        """Start creating a rank's sending end."""

    def send_weights(self, rank: int, stream: str, buckets: Sequence[Bucket], target: WeightTarget) -> Call:
        """Start sending buckets; the call returns their checksums."""


class Resharder:
    """Sends the weights that a model's ranks hold to engines, or to this process for export.

    Args:
        tensors: every Hugging Face tensor of the model, in model order, with the dtype to send.
        open_host: opens the configured transport.
        bucket_bytes: largest size of a bucket.
        device: device of a collective's buffers; "cuda" (NCCL) only if no engine shares a GPU with the actor.
    """

    def __init__(
        self,
        cluster: Cluster,
        actor: WeightSource,
        tensors: Sequence[TensorInfo],
        *,
        open_host: OpenHost,
        bucket_bytes: int,
        device: str = "cpu",
    ) -> None:
        self._cluster, self._actor = cluster, actor
        self._open_transport, self._bucket_bytes, self._device = open_host, bucket_bytes, device
        self._stage_ranks = actor.senders()
        self._host: Host | None = None
        # Engine rank and how often it was launched; the position is the receiver's index.
        self._connected: list[tuple[int, int]] = []
        self._plans: dict[WeightTarget, _Plan] = {}
        self.plan(WeightTarget.ACTOR, tensors)

    def plan(self, target: WeightTarget, tensors: Sequence[TensorInfo]) -> None:
        """Plan the buckets of a target; needed before its first update.

        Raises RunError if no rank holds one of the tensors.
        """
        owner: dict[str, int] = {}
        for stage, members in self._stage_ranks.items():
            owner |= dict.fromkeys(self._actor.weight_names(members[0], target), stage)
        missing = [tensor.name for tensor in tensors if tensor.name not in owner]
        if missing:
            raise RunError(f"No pipeline stage of the actor holds {', '.join(missing[:5])}.")
        self._plans[target] = _Plan(list(tensors), plan_buckets(tensors, owner.__getitem__, self._bucket_bytes))
        self._connected = []  # slots of the transport may be too small for the new buckets

    @property
    def buckets(self) -> list[Bucket]:
        """Buckets of the actor's weights."""
        return self._plans[WeightTarget.ACTOR].buckets

    def update(
        self, engines: WorkerGroup, ranks: Sequence[int], version: int, target: WeightTarget = WeightTarget.ACTOR
    ) -> list[int]:
        """Send a target's current weights as `version` to these engines; returns the ranks that hold it afterwards.

        An engine that dies meanwhile is left out; if the transport cannot continue without it, the update starts again
        with the others.

        Raises:
            RunError: an engine's checksum of a bucket differs (its tensors are named), or a worker failed or went
                silent.
        """
        remaining = list(ranks)
        while remaining:
            if self._connected != self._identities(engines, remaining) and not self._connect(engines, remaining):
                remaining = [rank for rank in remaining if rank in engines.ranks(*_CONNECTABLE)]
                continue
            sums, receives = self._transfer(engines, version, target)
            there = [call for call in receives if engines.still_there(call) and not call.dead]
            if sums is not None:
                return self._finish(engines, there, sums, version, target)
            self._connected, remaining = [], [call.rank for call in there]
        return []

    @staticmethod
    def _identities(engines: WorkerGroup, ranks: Sequence[int]) -> list[tuple[int, int]]:
        return [(rank, engines.launches(rank)) for rank in ranks]

    def _connect(self, engines: WorkerGroup, ranks: Sequence[int]) -> bool:
        """Open a transport between all senders and these engines; False if an engine died meanwhile."""
        if self._host is not None:
            self._host.close()
        self._connected = []
        self._host = self._open_host(len(ranks), self._device)
        calls = [engines.start(rank, "connect", self._host.address, index) for index, rank in enumerate(ranks)]
        senders = self._connect_senders("engines", self._host.address)
        self._watch([*calls, *senders], calls, self._host, "resharding connect")
        if not all(engines.still_there(call) and not call.dead for call in calls):
            return False
        for call in [*calls, *senders]:
            call.result()
        self._connected = self._identities(engines, ranks)
        return True

    def _transfer(
        self, engines: WorkerGroup, version: int, target: WeightTarget
    ) -> tuple[dict[int, int] | None, list[Call]]:
        """Transfer all buckets.

        Returns the senders' checksums, or None if a death broke the transport, and the receivers' calls.
        """
        assert self._host is not None
        plan = self._plans[target]
        arguments = ("receive_weights", version, plan.tensors, plan.buckets, target)
        receives = [engines.start(rank, *arguments) for rank, _ in self._connected]
        sums: dict[int, int] = {}
        sends: list[Call] = []
        for stage, buckets in plan.by_stage():
            sends = self._start_sending("engines", stage, buckets, target)
            self._watch(sends, receives, self._host, "reshard")
            if any(call.error for call in sends):
                break
            sums |= sends[0].result()
        self._watch(receives, receives, self._host, "reshard")
        broken = any(call.error and not call.dead for call in [*sends, *receives])
        return (None if broken and any(call.dead for call in receives) else sums), receives

    def _watch(self, awaited: Sequence[Call], receives: Sequence[Call], host: Host, phase: str) -> None:
        """Wait for these calls; a receiver that dies or fails meanwhile is dropped from the transport.

        Raises a sender's error, unless the death of a receiver may have caused it.
        """
        while not all(call.done for call in awaited):
            pending = [call for call in dict.fromkeys([*awaited, *receives]) if not call.done]
            self._cluster.wait(pending, phase, first=True, check=False)
            for index, call in enumerate(receives):
                if call.error:
                    host.drop(index)
            if not any(call.dead for call in receives):
                for call in awaited:
                    if call.error and call not in receives:
                        raise call.error

    def _finish(
        self,
        engines: WorkerGroup,
        receives: Sequence[Call],
        sums: Mapping[int, int],
        version: int,
        target: WeightTarget,
    ) -> list[int]:
        """Compare checksums, then make the weights live."""
        for call in receives:
            if sums.keys() != call.result().keys():
                raise RunError(
                    f"In phase 'reshard', engine {call.rank} did not confirm every bucket of the {target}'s version "
                    f"{version}."
                )
            self._compare(target, sums, call.result(), f"engine {call.rank}")
        ends = [engines.start(call.rank, "end_update", version) for call in receives]
        self._cluster.wait(ends, "reshard", check=False)
        held = [call for call in ends if engines.still_there(call) and not call.dead]
        for call in held:
            call.result()
            if target is WeightTarget.ACTOR:
                engines.confirm(call.rank, version)
        return [call.rank for call in held]

    def stream(self, target: WeightTarget = WeightTarget.ACTOR) -> Generator[tuple[str, torch.Tensor], None, None]:
        """(Hugging Face name, full CPU tensor) of every tensor of a target; at most one incomplete tensor is held.

        Each tensor is valid until the next one is requested. Whoever takes only some of them closes the generator: it
        waits until the ranks have sent what they are about to send.
        """
        host = self._open_host(1, "cpu")
        with ThreadPoolExecutor(1) as beside, closing(host):  # the host is closed first, which ends the thread's wait
            calls = self._connect_senders("export", host.address)
            receiver: Receiver = self._result(beside.submit(host.address.receiver, 0), calls)
            self._cluster.wait(calls, "export")
            with closing(receiver):
                for stage, buckets in self._plans[target].by_stage():
                    calls = self._start_sending("export", stage, buckets, target)
                    arrived = (self._result(beside.submit(receiver.receive, bucket), calls) for bucket in buckets)
                    sums: dict[int, int] = {}
                    try:
                        yield from self._assemble(self._plans[target], buckets, arrived, sums)
                    except GeneratorExit:
                        for _ in arrived:
                            pass
                        self._cluster.wait(calls, "export")
                        raise
                    self._cluster.wait(calls, "export")
                    self._compare(target, calls[0].result(), sums, "this process")

    def _result(self, work: Future[Any], calls: Sequence[Call]) -> Any:
        """Wait for the receiving thread; a sender's death or error ends the wait."""
        while not work.done():
            self._cluster.look("export", calls)
            wait_for([work], timeout=_LOOK_SECONDS)
        return work.result()

    def close(self) -> None:
        if self._host is not None:
            self._host.close()

    def _open_host(self, receivers: int, device: str) -> Host:
        slot_bytes = max(bucket.bytes for plan in self._plans.values() for bucket in plan.buckets)
        return self._open_transport(max(self._stage_ranks) + 1, receivers, slot_bytes, device)

    def _connect_senders(self, stream: str, address: Any) -> list[Call]:
        return [self._actor.connect(members[0], stream, address, stage) for stage, members in self._stage_ranks.items()]

    def _start_sending(self, stream: str, stage: int, buckets: list[Bucket], target: WeightTarget) -> list[Call]:
        return [self._actor.send_weights(rank, stream, buckets, target) for rank in self._stage_ranks[stage]]

    def _assemble(
        self, plan: _Plan, buckets: Sequence[Bucket], arrived: Iterable[torch.Tensor], sums: dict[int, int]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        shapes = {tensor.name: tensor.shape for tensor in plan.tensors}
        partial: dict[str, torch.Tensor] = {}
        for bucket, data in zip(buckets, arrived, strict=True):
            sums[bucket.id] = checksum(data)
            for name, start, values in unpack(bucket, data):
                size = prod(shapes[name])
                if values.numel() < size:  # a tensor larger than a bucket arrives in parts, in order
                    whole = partial.setdefault(name, torch.empty(size, dtype=values.dtype))
                    whole[start : start + values.numel()] = values.cpu()
                    if start + values.numel() < size:
                        continue
                    values = partial.pop(name)
                yield name, values.cpu().view(shapes[name])

    def _compare(self, target: WeightTarget, sent: Mapping[int, int], received: Mapping[int, int], who: str) -> None:
        """Raise RunError, naming the tensors, if received checksums differ from those sent."""
        buckets = self._plans[target].buckets
        if wrong := [bucket for bucket in buckets if bucket.id in sent and sent[bucket.id] != received.get(bucket.id)]:
            names = "; ".join(f"bucket {bucket.id} ({', '.join(bucket.names)})" for bucket in wrong)
            raise RunError(f"In phase 'reshard', the weights that {who} received differ from those sent: {names}.")
