"""The part of an engine worker that is the same for every engine: samples, their migration, and weights."""

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

ORDER_SECONDS = 30.0  # a migration that takes longer after its first byte is cancelled
_ACKNOWLEDGEMENT_SECONDS = 0.001  # pause between two polls while the engine is idle


class EngineWorker(ABC):
    """Has an engine, a receiver of weights and, once it has joined migration, a migration agent.

    The driver calls the public methods here, and `take_tally`, `remember` and `drafting_state` of the subclasses.

    Args:
        engine: the engine; nobody else calls it.
        weights_device: device that received weights are loaded to.
    """

    def __init__(self, engine: RolloutEngine, weights_device: str) -> None:
        self.engine = engine
        self.receiver = WeightReceiver(engine, weights_device)
        self.migration: MigrationAgent | None = None

    @abstractmethod
    def prepare(self) -> None:
        """Called before the first samples of a rollout."""

    @abstractmethod
    def pace(self, temperature: float) -> Throughput:
        """Predicted decode throughput of the engine."""

    def advance(
        self,
        samples: Sequence[SampleSnapshot],
        seconds: float,
        orders: MigrationOrders | None = None,
        forget: bool = False,
        others_wait: bool = False,
    ) -> EngineReport:
        """Take these samples, decode for about `seconds`, and report everything since the last report.

        An update of the draft that is still open is dropped: its transfer was lost while this engine was considered
        silent.

        Args:
            orders: migrations to carry out; None if migration is off.
            forget: drop all samples that the engine still holds: they belong to an earlier rollout or to another engine
                now.
            others_wait: more samples wait for an engine with room: report as soon as a slot is free.
        """
        engine = self.engine
        engine.abandon_draft_update()
        if forget:
            self.clear()
        if self.migration:
            self.migration.collect_acknowledgements()
            engine.abort([sample.request.sample_id for sample in samples])  # copies that failed migrations left behind
        if samples:
            self.prepare()
        for sample in samples:
            if sample.tokens:
                engine.import_sample(sample)
        engine.submit([sample.request for sample in samples if not sample.tokens])
        moves = self.migration if orders is not None else None  # None too in a restarted worker that has not joined
        if moves and orders:
            finished = self._decode_and_move(moves, seconds, orders, others_wait)
        else:
            finished = self._decode(seconds, others_wait)
        load = engine.load()
        report = EngineReport(finished, engine.progress(), load.running + load.waiting, spans=engine.spans.take())
        if moves:
            report.migration = moves.report()
            report.unfinished += moves.unacknowledged
        return report

    def _decode(self, seconds: float, others_wait: bool) -> list[GenerationResult]:
        """Decode without migrations; see `advance`."""
        engine, end = self.engine, time.monotonic() + seconds
        if not others_wait:
            return engine.poll(seconds)
        finished = list[GenerationResult]()
        while True:
            ended = engine.poll(engine.poll_interval)
            finished += ended
            if engine.idle or (ended and self._has_room()) or time.monotonic() >= end:
                return finished

    def _has_room(self) -> bool:
        load = self.engine.load()
        return load.running + load.waiting < load.slots

    def _decode_and_move(
        self, migration: MigrationAgent, seconds: float, orders: MigrationOrders, others_wait: bool
    ) -> list[GenerationResult]:
        """Decode, with migrations between steps; an engine without samples waits for those that it expects."""
        engine, end, finished = self.engine, time.monotonic() + seconds, list[GenerationResult]()
        migration.take_orders(orders)
        while True:
            if migration.active:  # most steps of a short rollout come and go without a migration
                migration.on_step_boundary()
            ended = list[GenerationResult]()
            if not engine.idle:
                ended = engine.poll(engine.poll_interval)
                finished += ended
                migration.record_step(*engine.last_decode)
            left = end - time.monotonic()
            if left <= 0 or migration.asked or (engine.idle and not migration.busy and not migration.expecting):
                return finished
            if others_wait and ended and self._has_room():
                return finished
            if engine.idle:
                migration.wait(min(left, _ACKNOWLEDGEMENT_SECONDS) if migration.busy else left)

    def join_migration(self, temperature: float) -> PeerInfo:
        """Before a rollout with migration: the address where this engine listens, and its predicted speed.

        Samples left from an earlier rollout, which this engine missed the end of, are dropped.
        """
        self.clear()
        if self.migration is None:
            self.migration = MigrationAgent(self.engine, os.environ.get(HOST, LOOPBACK), ORDER_SECONDS)
        pace, slots, stats = self.pace(temperature), self.engine.load().slots, self.engine.stats()
        prefill = stats["prefill_seconds"] / stats["prefill_tokens"] if stats["prefill_tokens"] else math.inf
        room, copy = self.engine.max_positions * slots, self.migration.copy_seconds
        return PeerInfo(self.migration.address, pace, slots, room, prefill, copy)

    def leave(self) -> None:
        """Stop taking part in migrations: connections are closed, as if the process had ended."""
        if self.migration is not None:
            self.migration.close()
            self.migration = None

    def clear(self) -> None:
        """Drop every sample, and those on their way here or from here."""
        self.engine.clear()
        if self.migration is not None:
            self.migration.end_rollout()

    def connect(self, address: Any, index: int) -> None:
        """Create the receiving end of a transport; replaces an earlier one."""
        self.receiver.connect(address, index)

    def receive_weights(
        self,
        version: int,
        tensors: Sequence[TensorInfo],
        buckets: Sequence[Bucket],
        target: WeightTarget = WeightTarget.ACTOR,
    ) -> dict[int, int]:
        """Receive an update; returns the checksum of each bucket id. The weights become live in `end_update`."""
        return self.receiver.receive(version, tensors, buckets, target)

    def end_update(self, version: int) -> None:
        """Make the weights live that were received last."""
        self.engine.end_update(version)
