"""The destination's side of migration: takes samples from other engines and measures the downtime of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

import torch

from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.rollout.migration.messages import (
    Arrival,
    CalledOff,
    FreeStaging,
    KvPiece,
    MigrationOrder,
    Moves,
    ReportNow,
)
from rlhfspec_mega.rollout.migration.staging import Staging
from rlhfspec_mega.rollout.migration.wire import Inbox, Received
from rlhfspec_mega.rollout.protocol import DraftPast, RolloutEngine, SampleSnapshot
from rlhfspec_mega.types import Landing, SampleProgress

DRAIN_SECONDS = 2.0  # longest wait for the last messages of a dead engine


class Arrivals:
    """Samples that other engines send to this one, and what the driver tells it while it decodes.

    Attributes:
        rollout: number of the current rollout; messages about other rollouts are ignored.
        arrived: samples taken since the last report, with all their tokens.
        landings: samples taken earlier or now that were first decoded here since the last report.
        orders: those of the driver that nobody has begun to carry out.
        report_now: whether the driver has asked for a report.
        called_off: numbers of orders whose samples stay where they are, as was heard since the last report.
        settled: numbers of the orders by which no sample will come any more: it has come, or stays where it is.
    """

    def __init__(self, engine: RolloutEngine, inbox: Inbox) -> None:
        self._engine, self._inbox = engine, inbox
        self.rollout = 0
        self._buffers: defaultdict[str, dict[int, Staging]] = defaultdict(dict)  # by source and number
        self._undecoded: list[tuple[str, Arrival]] = []  # (source, sample), not decoded here yet
        self.arrived: list[SampleProgress] = []
        self.landings: list[Landing] = []
        self.orders: list[MigrationOrder] = []
        self.report_now = False
        self.called_off: list[int] = []
        self.settled = set[int]()

    @property
    def pending(self) -> bool:
        """Whether messages have come, or samples have that were not decoded here yet."""
        return bool(self._undecoded) or not self._inbox.empty

    def on_step_boundary(self) -> None:
        """Take the samples that have arrived."""
        # A sample that was sent on to another engine before it got a slot here has no landing here.
        self._undecoded = [
            (source, arrival)
            for source, arrival in self._undecoded
            if self._engine.has_sample(arrival.snapshot.request.sample_id)
        ]
        self._process(self._inbox.take())

    def wait(self, seconds: float) -> None:
        """Take the samples that have arrived, after waiting up to `seconds` for the first message."""
        self._process(self._inbox.take(seconds))

    def drain_dead_sources(self, sources: Sequence[str]) -> None:
        """Take the samples that dead engines had already sent; whatever comes from them later is ignored."""
        for source in sources:
            self._process(self._inbox.drain(source, DRAIN_SECONDS), dead=sources)
            self._buffers.pop(source, None)

    def record_step(self, started: float, seconds: float) -> None:
        """Note the landing of samples that were decoded here for the first time in the step that has just ended."""
        waiting = []
        for source, arrival in self._undecoded:
            sample_id = arrival.snapshot.request.sample_id
            if self._engine.is_waiting(sample_id):
                waiting.append((source, arrival))
                continue
            self.landings.append(
                Landing(
                    sample_id=sample_id,
                    source=source,
                    departed=arrival.departed,
                    arrived=started,
                    settled_bytes=arrival.settled_bytes,
                    delta_bytes=arrival.delta_bytes,
                    step_seconds=seconds,
                    begun=bool(arrival.snapshot.tokens),
                )
            )
        self._undecoded = waiting

    def end_rollout(self) -> None:
        """Discard what belongs to this rollout, which has ended or was abandoned; later messages of it are ignored."""
        self.rollout += 1
        self._buffers.clear()
        self._undecoded.clear()
        self.arrived, self.landings, self.orders, self.called_off = [], [], [], []
        self.settled.clear()
        self.report_now = False

    def _process(self, received: list[Received], dead: Collection[str] = ()) -> None:
        for source, message, payload in received:
            if message is None:
                self._buffers.pop(source, None)
            elif isinstance(message, KvPiece):
                self._write(self._buffers[source], message, payload)
            elif isinstance(message, FreeStaging):
                self._buffers[source].pop(message.staging, None)
            elif message.rollout != self.rollout:
                continue
            elif isinstance(message, Moves):
                self.orders += message.orders
            elif isinstance(message, ReportNow):
                self.report_now = True
            elif isinstance(message, CalledOff):
                self.settled.add(message.order)
                self.called_off.append(message.order)
            else:
                self._take(source, message, dead=source in dead)

    def _write(self, buffers: dict[int, Staging], piece: KvPiece, payload: bytearray) -> None:
        if piece.staging not in buffers:
            buffers[piece.staging] = Staging.private(piece.layout)
        target = buffers[piece.staging].parts[piece.part][:, :, :, piece.first : piece.first + piece.rows]
        target.copy_(torch.frombuffer(payload, dtype=target.dtype).view(target.shape))

    def _take(self, source: str, arrival: Arrival, dead: bool) -> None:
        """Take a sample and acknowledge it. Drop it if its source cannot be told: then it is the source's or lost."""
        snapshot, sample_id = arrival.snapshot, arrival.snapshot.request.sample_id
        snapshot.reported = None  # `arrived` reports all of its tokens
        self.settled.add(arrival.order)
        self._engine.abort([sample_id])  # a copy left from an earlier move that failed halfway
        if snapshot.tokens:
            self._import(source, arrival)
        else:
            self._engine.submit([snapshot.request])  # so that waiting members of a group share a prefill
        # A dead source is not told: the driver has asked for the samples that it had sent, and waits for the report.
        if not dead and not self._inbox.acknowledge(source, arrival.transfer):
            self._engine.abort([sample_id])
            return
        self.arrived.append(SampleProgress(sample_id, snapshot.tokens, snapshot.logprobs, snapshot.versions))
        self._undecoded.append((source, arrival))

    def _import(self, source: str, arrival: Arrival) -> None:
        snapshot = arrival.snapshot
        try:
            self._engine.import_sample(self._with_kv(self._buffers[source], arrival))
        except (UserError, RunError):
            # Its KV does not fit this engine or is not available: the tokens are enough to continue.
            snapshot.kv = snapshot.draft = None
            self._engine.import_sample(snapshot)

    def _with_kv(self, buffers: dict[int, Staging], arrival: Arrival) -> SampleSnapshot:
        """The snapshot with the KV of its staging buffers. Raises RunError if one of them is not available."""
        snapshot = arrival.snapshot
        if arrival.staging is None:
            return snapshot
        parts = self._opened(buffers, arrival.staging, arrival).parts
        del buffers[arrival.staging]
        if arrival.prompt is not None:
            prompt = self._opened(buffers, arrival.prompt, arrival).parts
            for part, rows in arrival.prompt_rows.items():
                parts[part][:, :, :, :rows] = prompt[part][:, :, :, :rows]
        snapshot.kv = parts["target"][:, :, :, : arrival.rows["target"]]
        if snapshot.draft is not None:
            kv = parts["draft"][:, :, :, : arrival.rows["draft"]]
            snapshot.draft = DraftPast(kv, snapshot.draft.features)
        return snapshot

    def _opened(self, buffers: dict[int, Staging], number: int, arrival: Arrival) -> Staging:
        if number not in buffers:
            if number not in arrival.handles:
                raise RunError(f"Sample {arrival.snapshot.request.sample_id} arrived without its KV.")
            buffers[number] = Staging.opened(arrival.handles[number])
        return buffers[number]
