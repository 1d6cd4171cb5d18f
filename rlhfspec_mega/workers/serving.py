"""What a worker of role engine does whatever its engine is: takes and moves samples, receives weights, scores."""

from __future__ import annotations

import math
import os
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from rlhfspec_mega.cluster.environment import HOST, LOOPBACK
from rlhfspec_mega.errors import RunError
from rlhfspec_mega.observe.spans import SpanRecorder
from rlhfspec_mega.planning.rollout_state import Throughput
from rlhfspec_mega.resharding.buckets import Bucket
from rlhfspec_mega.resharding.receive import receive_weights
from rlhfspec_mega.resharding.transport import Receiver
from rlhfspec_mega.rollout.migration.agent import MigrationAgent
from rlhfspec_mega.rollout.migration.messages import Meeting, Orders
from rlhfspec_mega.rollout.protocol import RolloutEngine, SampleSnapshot
from rlhfspec_mega.types import EngineReport, GenerationResult, TensorInfo, WeightTarget

ORDER_SECONDS = 30.0  # from the first byte copied on, in which a sample has moved, or stays
_ACKNOWLEDGEMENT_SECONDS = 0.001  # between two looks for one, with nothing else to do


class ServingEngine(RolloutEngine):
    """Base of workers, after the engine's own class, which implements the protocol.

    Attributes:
        max_positions: tokens of prompt and response that the engine holds of a sample.
        last_decode: when the last decode step began, in seconds since the epoch, and its seconds.
        spans: what the time goes into.
        turn_seconds: of decoding between two looks at migrations; 0: one step.
        weights_device: where weights are loaded.
    """

    max_positions: int
    last_decode: tuple[float, float]
    spans: SpanRecorder
    turn_seconds = 0.0
    weights_device = "cpu"
    migration: MigrationAgent | None = None
    _receiver: Receiver | None = None

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether the engine holds no sample."""

    @abstractmethod
    def pace(self, temperature: float) -> Throughput:
        """How fast it decodes."""

    def prepare(self) -> None:
        """Before samples come."""

    def advance(self, samples: Sequence[SampleSnapshot], seconds: float, orders: Orders | None = None) -> EngineReport:
        """Take these samples, decode for about `seconds`, and report all that the driver does not know yet.

        Args:
            orders: of migrations; None where samples stay.
        """
        if self.migration:
            self.migration.collect()
            self.abort([sample.request.sample_id for sample in samples])  # copies left from moves that failed halfway
        if samples:
            self.prepare()
        fresh = [sample.request for sample in samples if not sample.tokens]
        for sample in samples:
            if sample.tokens:
                self.import_sample(sample)
        self.submit(fresh)
        moves = orders is not None and self.migration is not None  # one that was started anew has met nobody
        finished = self._decode(seconds, orders) if moves and orders else self.poll(seconds)
        load = self.load()
        report = EngineReport(finished, self.progress(), load.running + load.waiting, spans=self.spans.take())
        if moves and self.migration:
            report.migration = self.migration.report()
            report.unfinished += self.migration.undecided
        return report

    def _decode(self, seconds: float, orders: Orders) -> list[GenerationResult]:
        """Decode with migrations between the steps; an engine without samples waits for those that are expected."""
        assert self.migration is not None
        end, finished = time.monotonic() + seconds, list[GenerationResult]()
        self.migration.follow(orders)
        while True:
            self.migration.turn()
            if not self.idle:
                finished += self.poll(self.turn_seconds)
                self.migration.stepped(*self.last_decode)
            left = end - time.monotonic()
            if left <= 0 or (self.idle and not self.migration.busy and not orders.expects):
                return finished
            if self.idle:
                self.migration.wait(min(left, _ACKNOWLEDGEMENT_SECONDS) if self.migration.busy else left)

    def meet(self, temperature: float) -> Meeting:
        """Before a rollout with migrations: where this engine listens, and how fast it decodes.

        What it still has of an earlier one, if it was taken for silent when that ended, is of no use to anyone.
        """
        self.clear()
        if self.migration is None:
            self.migration = MigrationAgent(self, os.environ.get(HOST, LOOPBACK), ORDER_SECONDS)
        pace, slots, stats = self.pace(temperature), self.load().slots, self.stats()
        prefill = stats["prefill_seconds"] / stats["prefill_tokens"] if stats["prefill_tokens"] else math.inf
        self.migration.forget()
        room, copy = self.max_positions * slots, self.migration.copy_seconds
        return Meeting(self.migration.address, pace, slots, room, prefill, copy)

    def leave(self) -> None:
        """Take no more part in migrations: connections end, as they do when the process does."""
        if self.migration is not None:
            self.migration.close()
            self.migration = None

    def forget_moves(self) -> None:
        """Give up samples on their way here and from here."""
        if self.migration is not None:
            self.migration.forget()

    def connect(self, address: Any, index: int) -> None:
        """Make the receiving end of a transport in place of the last one."""
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = address.receiver(index)

    def receive_weights(
        self,
        version: int,
        tensors: Sequence[TensorInfo],
        buckets: Sequence[Bucket],
        target: WeightTarget = WeightTarget.ACTOR,
    ) -> dict[int, int]:
        """Load an update; {bucket id: checksum}. Not live before `end_update`."""
        if self._receiver is None:
            raise RunError("An engine was asked for weights before it was connected to a transport.")
        return receive_weights(self, self._receiver, version, tensors, buckets, target, self.weights_device)
