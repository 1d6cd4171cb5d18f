"""The worker of role engine, whatever its engine is: takes and moves samples, receives weights."""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from rlhfspec_mega.cluster.environment import HOST, LOOPBACK
from rlhfspec_mega.planning.rollout_state import Throughput
from rlhfspec_mega.resharding.buckets import Bucket
from rlhfspec_mega.resharding.receive import WeightReceiver
from rlhfspec_mega.rollout.migration.agent import MigrationAgent
from rlhfspec_mega.rollout.migration.messages import MigrationOrders, PeerInfo
from rlhfspec_mega.rollout.protocol import RolloutEngine, SampleSnapshot
from rlhfspec_mega.types import EngineReport, GenerationResult, TensorInfo, WeightTarget

ORDER_SECONDS = 30.0  # from the first byte copied on, in which a sample has moved, or stays
_ACKNOWLEDGEMENT_SECONDS = 0.001  # between two looks for one, with nothing else to do


class EngineWorker(ABC):
    """Has an engine, a receiver of weights and, once it has joined migration, a migration agent.

    The driver calls these methods, and `take_tally` and `drafting_state` of each kind.

    Args:
        engine: that decodes; it is called by nobody else.
        weights_device: where its weights are loaded.
    """

    def __init__(self, engine: RolloutEngine, weights_device: str) -> None:
        self.engine = engine
        self.receiver = WeightReceiver(engine, weights_device)
        self.migration: MigrationAgent | None = None

    @abstractmethod
    def prepare(self) -> None:
        """Before samples come."""

    @abstractmethod
    def pace(self, temperature: float) -> Throughput:
        """How fast the engine decodes."""

    def advance(
        self,
        samples: Sequence[SampleSnapshot],
        seconds: float,
        orders: MigrationOrders | None = None,
        forget: bool = False,
    ) -> EngineReport:
        """Take these samples, decode for about `seconds`, and report all that the driver does not know yet.

        A driver that asks for samples waits for no update of the draft: one still open has lost its transfer while this
        engine was taken for silent.

        Args:
            orders: of migrations; None where samples stay.
            forget: whatever the engine has was given to another one, or is of an earlier rollout.
        """
        engine = self.engine
        engine.abandon_draft_update()
        if forget:
            self.clear()
        if self.migration:
            self.migration.collect_acknowledgements()
            engine.abort([sample.request.sample_id for sample in samples])  # copies left from moves that failed halfway
        if samples:
            self.prepare()
        for sample in samples:
            if sample.tokens:
                engine.import_sample(sample)
        engine.submit([sample.request for sample in samples if not sample.tokens])
        moves = self.migration if orders is not None else None  # None too in a restarted worker that has not joined
        finished = self._decode(moves, seconds, orders) if moves and orders else engine.poll(seconds)
        load = engine.load()
        report = EngineReport(finished, engine.progress(), load.running + load.waiting, spans=engine.spans.take())
        if moves:
            report.migration = moves.report()
            report.unfinished += moves.unacknowledged
        return report

    def _decode(self, migration: MigrationAgent, seconds: float, orders: MigrationOrders) -> list[GenerationResult]:
        """Decode with migrations between the steps; an engine without samples waits for those that are expected."""
        engine, end, finished = self.engine, time.monotonic() + seconds, list[GenerationResult]()
        migration.take_orders(orders)
        while True:
            migration.on_step_boundary()
            if not engine.idle:
                finished += engine.poll(engine.migration_interval)
                migration.record_step(*engine.last_decode)
            left = end - time.monotonic()
            if left <= 0 or (engine.idle and not migration.busy and not orders.expects_arrivals):
                return finished
            if engine.idle:
                migration.wait(min(left, _ACKNOWLEDGEMENT_SECONDS) if migration.busy else left)

    def join_migration(self, temperature: float) -> PeerInfo:
        """Before a rollout with migrations: where this engine listens, and how fast it decodes.

        What it still has of an earlier one, if it was taken for silent when that ended, is of no use to anyone.
        """
        self.clear()
        if self.migration is None:
            self.migration = MigrationAgent(self.engine, os.environ.get(HOST, LOOPBACK), ORDER_SECONDS)
        pace, slots, stats = self.pace(temperature), self.engine.load().slots, self.engine.stats()
        prefill = stats["prefill_seconds"] / stats["prefill_tokens"] if stats["prefill_tokens"] else math.inf
        room, copy = self.engine.max_positions * slots, self.migration.copy_seconds
        return PeerInfo(self.migration.address, pace, slots, room, prefill, copy)

    def leave(self) -> None:
        """Take no more part in migrations: connections end, as they do when the process does."""
        if self.migration is not None:
            self.migration.close()
            self.migration = None

    def clear(self) -> None:
        """Forget every sample, and those on their way here and from here."""
        self.engine.clear()
        if self.migration is not None:
            self.migration.end_rollout()

    def connect(self, address: Any, index: int) -> None:
        """Make the receiving end of a transport in place of the last one."""
        self.receiver.connect(address, index)

    def receive_weights(
        self,
        version: int,
        tensors: Sequence[TensorInfo],
        buckets: Sequence[Bucket],
        target: WeightTarget = WeightTarget.ACTOR,
    ) -> dict[int, int]:
        """Load an update; {bucket id: checksum}. Not live before `end_update`."""
        return self.receiver.receive(version, tensors, buckets, target)

    def end_update(self, version: int) -> None:
        """Make the weights live that were received last."""
        self.engine.end_update(version)
