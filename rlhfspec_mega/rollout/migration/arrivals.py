"""The destination's side: takes samples that come from other engines, and notes how long each was decoded nowhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

import torch

from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.rollout.migration.messages import Arrival, Dropped, Piece
from rlhfspec_mega.rollout.migration.staging import Staging
from rlhfspec_mega.rollout.migration.wire import Inbox, Received
from rlhfspec_mega.rollout.protocol import DraftPast, RolloutEngine, SampleSnapshot
from rlhfspec_mega.types import Landing, SampleProgress

CUT_SECONDS = 2.0  # to wait for the last messages of a dead engine


class Arrivals:
    """Samples on their way into one engine.

    Attributes:
        rollout: number of the one whose samples are taken.
        arrived: samples taken since the last report, with all their tokens.
        landings: of samples that were decoded here for the first time since the last report.
    """

    def __init__(self, engine: RolloutEngine, inbox: Inbox) -> None:
        self._engine, self._inbox = engine, inbox
        self.rollout = 0
        self._memory: defaultdict[str, dict[int, Staging]] = defaultdict(dict)  # by source and number
        self._undecoded: list[tuple[str, Arrival]] = []
        self.arrived: list[SampleProgress] = []
        self.landings: list[Landing] = []

    def turn(self) -> None:
        """At a step boundary: take what has come. Samples sent on before they found a slot have not landed here."""
        self._undecoded = [one for one in self._undecoded if self._engine.holds(one[1].snapshot.request.sample_id)]
        self._file(self._inbox.take())

    def wait(self, seconds: float) -> None:
        """Take what has come, waiting up to so long for the first."""
        self._file(self._inbox.take(seconds))

    def cut(self, sources: Sequence[str]) -> None:
        """Take what dead engines have still sent, and nothing of them afterwards."""
        for source in sources:
            self._file(self._inbox.cut(source, CUT_SECONDS), dead=sources)
            self._memory.pop(source, None)

    def stepped(self, started: float, seconds: float) -> None:
        """A decode step has ended: samples that found a slot were decoded in it for the first time."""
        waiting = []
        for source, arrival in self._undecoded:
            sample_id = arrival.snapshot.request.sample_id
            if self._engine.waits(sample_id):
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

    def forget(self) -> None:
        """The rollout is over or was given up: what still comes of it is left aside."""
        self.rollout += 1
        self._memory.clear()
        self._undecoded.clear()
        self.arrived, self.landings = [], []

    def _file(self, received: list[Received], dead: Collection[str] = ()) -> None:
        for source, message, payload in received:
            if message is None:
                self._memory.pop(source, None)
            elif isinstance(message, Piece):
                self._write(self._memory[source], message, payload)
            elif isinstance(message, Dropped):
                self._memory[source].pop(message.staging, None)
            elif message.rollout == self.rollout:
                self._take(source, message, dead=source in dead)

    def _write(self, memory: dict[int, Staging], piece: Piece, payload: bytearray) -> None:
        if piece.staging not in memory:
            memory[piece.staging] = Staging.private(piece.layout)
        target = memory[piece.staging].parts[piece.part][:, :, :, piece.first : piece.first + piece.rows]
        target.copy_(torch.frombuffer(payload, dtype=target.dtype).view(target.shape))

    def _take(self, source: str, arrival: Arrival, dead: bool) -> None:
        """Hold the sample, if its source can be told so: otherwise it belongs there, or to the driver."""
        snapshot, sample_id = arrival.snapshot, arrival.snapshot.request.sample_id
        snapshot.reported = None  # the report of the arrival has all tokens
        self._engine.abort([sample_id])  # a copy left from an earlier move that failed halfway
        if snapshot.tokens:
            self._hold(source, arrival)
        else:
            self._engine.submit([snapshot.request])  # waiting members of a group share a prefill
        # A dead source needs no word: the driver asked for what it had sent, and waits for the report.
        if not dead and not self._inbox.acknowledge(source, arrival.transfer):
            self._engine.abort([sample_id])
            return
        self.arrived.append(SampleProgress(sample_id, snapshot.tokens, snapshot.logprobs, snapshot.versions))
        self._undecoded.append((source, arrival))

    def _hold(self, source: str, arrival: Arrival) -> None:
        snapshot = arrival.snapshot
        try:
            self._engine.import_sample(self._with_kv(self._memory[source], arrival))
        except (UserError, RunError):
            # Its KV does not fit this engine or cannot be had: the tokens alone are enough to go on.
            snapshot.kv = snapshot.draft = None
            self._engine.import_sample(snapshot)

    def _with_kv(self, memory: dict[int, Staging], arrival: Arrival) -> SampleSnapshot:
        snapshot = arrival.snapshot
        if arrival.staging is None:
            return snapshot
        parts = self._opened(memory, arrival.staging, arrival).parts
        del memory[arrival.staging]
        if arrival.prompt is not None:
            prompt = self._opened(memory, arrival.prompt, arrival).parts
            for part, rows in arrival.prompt_rows.items():
                parts[part][:, :, :, :rows] = prompt[part][:, :, :, :rows]
        snapshot.kv = parts["target"][:, :, :, : arrival.rows["target"]]
        if snapshot.draft is not None:
            kv = parts["draft"][:, :, :, : arrival.rows["draft"]]
            snapshot.draft = DraftPast(kv, snapshot.draft.features)
        return snapshot

    def _opened(self, memory: dict[int, Staging], number: int, arrival: Arrival) -> Staging:
        if number not in memory:
            if number not in arrival.handles:
                raise RunError(f"The KV of sample {arrival.snapshot.request.sample_id} did not come with it.")
            memory[number] = Staging.opened(arrival.handles[number])
        return memory[number]
