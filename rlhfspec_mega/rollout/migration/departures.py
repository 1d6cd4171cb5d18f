"""The source's side of migration: copies committed KV between decode steps and hands samples over at a boundary."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from dataclasses import dataclass, field

import torch

from rlhfspec_mega.errors import RunError, SilentEngineError
from rlhfspec_mega.rollout.migration.messages import Arrival, CalledOff, FreeStaging, KvPiece, MigrationOrder
from rlhfspec_mega.rollout.migration.staging import Handle, Layout, Staging
from rlhfspec_mega.rollout.migration.wire import Address, Outbox, this_machine
from rlhfspec_mega.rollout.protocol import RolloutEngine, SampleSnapshot

COPY_SHARE = 0.05  # share of the decoding time that copying may take
FIRST_RATE = 1e9  # bytes per second of copying, before the first measurement


class _Copy:
    """The copy of a sample's or a prompt's KV for one destination, written in pieces between decode steps.

    Args:
        outbox: connection on which pieces are sent; None: pieces are written to shared memory, whose handle the
            destination gets with the sample.

    Attributes:
        copied: number of positions copied so far, by part.
    """

    def __init__(self, number: int, layout: Layout, outbox: Outbox | None) -> None:
        self.number, self._layout, self._outlet = number, layout, outbox
        self._shared = None if outbox else Staging.shared(layout)
        self.copied = dict.fromkeys(layout.parts, 0)

    @property
    def handle(self) -> Handle | None:
        return self._shared.handle if self._shared else None

    def covers(self, positions: dict[str, int]) -> bool:
        """Whether this many positions of each part are copied."""
        return all(self.copied[part] >= count for part, count in positions.items())

    def write(self, part: str, piece: torch.Tensor) -> None:
        """Copy the next positions [layers, 2, kv_heads, rows, head_dim]. Raises OSError if the destination is gone."""
        first, rows = self.copied[part], piece.shape[3]
        if self._shared:
            self._shared.parts[part][:, :, :, first : first + rows] = piece
        elif self._outlet:
            payload = piece.contiguous().cpu().view(torch.uint8).numpy().reshape(-1).data
            self._outlet.send(KvPiece(self.number, self._layout, part, first, rows), payload)
        self.copied[part] += rows

    def close(self) -> None:
        """Release the shared memory: the destination has opened it or never will."""
        if self._shared:
            self._shared.close()


@dataclass
class _Link:
    """The connection to a destination, and the prompts' KV that was copied there, by group id."""

    address: Address
    outbox: Outbox
    prompts: dict[str, _Copy] = field(default_factory=dict)


@dataclass
class _OutgoingSample:
    """A sample in stage one: it is still decoded here while its KV is copied.

    Attributes:
        own: copy of the sample's own KV.
        prompt: copy of the KV of its group's prompt, shared by all members of the group; None for short prompts.
        prompt_rows: number of positions taken from the prompt's copy, by part.
        deadline: time.monotonic() after which the migration is cancelled; set when the first byte is copied, because
            copies wait for each other.
        settled_bytes: bytes copied so far.
        caught_up: whether all KV committed at the last step boundary is copied; the next one hands the sample over.
    """

    order: MigrationOrder
    link: _Link
    own: _Copy
    prompt: _Copy | None
    prompt_rows: dict[str, int]
    deadline: float = math.inf
    settled_bytes: int = 0
    caught_up: bool = False


class Departures:
    """Samples that this engine sends to others.

    Stage one: between decode steps, KV is copied for a small share of a step's time, oldest order first. Once all
    committed KV of a sample is copied, stage two hands the sample over at the next step boundary, with the KV committed
    since, its tokens, and the features that its draft has not processed. The sample counts as the source's until the
    destination has acknowledged it.

    Args:
        name: name of this engine's process.
        seconds: time limit of stage one, after which the migration is cancelled.

    Attributes:
        departed: ids of samples that destinations have acknowledged since the last report.
        kept: ids of samples whose migration was cancelled since the last report.
    """

    def __init__(self, engine: RolloutEngine, name: str, seconds: float) -> None:
        self._engine, self._name, self._seconds = engine, name, seconds
        self._machine = this_machine()
        self._links: dict[str, _Link] = {}
        self._outgoing: dict[str, _OutgoingSample] = {}
        self._unacknowledged: dict[int, tuple[_Link, SampleSnapshot, _Copy | None]] = {}
        self._unreachable: set[str] = set()  # names of engines that could not be connected to in this rollout
        self._numbers = itertools.count()
        self._rate = FIRST_RATE
        self._boundary = 0.0  # end of the last step, in seconds since the epoch
        self.departed: list[str] = []
        self.kept: list[str] = []

    @property
    def busy(self) -> bool:
        return bool(self._outgoing or self._unacknowledged)

    @property
    def copy_seconds(self) -> float:
        return self._engine.kv_layout(1).bytes / self._rate

    @property
    def unacknowledged(self) -> int:
        return len(self._unacknowledged)

    def order(self, order: MigrationOrder) -> None:
        """Begin to migrate a sample; the order is cancelled if the sample is unknown or has ended."""
        self._boundary = time.time()
        link = self._link(order.destination)
        if not self._engine.has_sample(order.sample_id) or order.sample_id in self._outgoing or link is None:
            self._keep(order, link)
            return
        committed = self._engine.committed_positions(order.sample_id)
        if committed is None or 2 * self.copy_seconds >= order.prefill_seconds:  # twice: it is written and read
            self._hand_over(link, order, None)
        else:
            self._engine.catch_up_draft([order.sample_id])
            try:
                self._outgoing[order.sample_id] = self._begin(order, link)
            except OSError:  # no memory to copy to, or too many open files
                self._hand_over(link, order, None)

    def on_step_boundary(self, step_seconds: float) -> None:
        """Hand over samples whose KV is copied, then copy for a share of the time that a step takes."""
        self._boundary = time.time()
        self.collect_acknowledgements()
        for sample_id, outgoing in list(self._outgoing.items()):
            if self._outgoing.get(sample_id) is not outgoing:
                continue  # cancelled in this loop, because its destination turned out to be gone
            if not self._engine.has_sample(sample_id) or time.monotonic() > outgoing.deadline:
                self._give_up(sample_id)
            elif outgoing.caught_up:
                del self._outgoing[sample_id]
                self._hand_over(outgoing.link, outgoing.order, outgoing)
        budget = max(self._engine.min_copy_bytes, int(COPY_SHARE * step_seconds * self._rate))
        for sample_id, outgoing in list(self._outgoing.items()):
            if budget <= 0:
                return
            if self._outgoing.get(sample_id) is outgoing and not outgoing.caught_up:
                budget -= self._copy_or_lose(sample_id, outgoing, budget)

    def end_rollout(self) -> None:
        """Cancel all migrations: the rollout has ended or was abandoned."""
        for _, _, own in self._unacknowledged.values():
            if own is not None:
                own.close()
        self._unacknowledged.clear()
        self.collect_acknowledgements()
        while self._outgoing:  # to give up one may show that its destination is gone, and with it others
            self._give_up(next(iter(self._outgoing)))
        for link in list(self._links.values()):
            prompts, link.prompts = link.prompts, {}  # a destination may turn out to be gone
            for copy in prompts.values():
                self._discard(link, copy)
        self._unreachable.clear()
        self.departed, self.kept = [], []

    def close(self) -> None:
        self.end_rollout()
        for link in self._links.values():
            link.outbox.close()
        self._links.clear()

    # Stage one

    def _link(self, address: Address) -> _Link | None:
        if address.name in self._unreachable:
            return None
        if address.name not in self._links:
            try:
                self._links[address.name] = _Link(address, Outbox(address, self._name))
            except OSError:  # it has just died, which the driver detects by itself
                self._unreachable.add(address.name)
                return None
        return self._links[address.name]

    def _begin(self, order: MigrationOrder, link: _Link) -> _OutgoingSample:
        request = self._engine.request(order.sample_id)
        committed = self._engine.committed_positions(order.sample_id) or {}
        prompt_tokens = len(request.prompt_tokens)
        # The buffer is for the longest response possible, as pages that are never written take no memory.
        own = self._copy(link, self._engine.kv_layout(prompt_tokens + request.max_new_tokens))
        # Without the last two: the last token is the input of a decode step, and the draft may lag one entry behind.
        prompt_rows = {part: min(count, prompt_tokens - 2) for part, count in committed.items()}
        prompt = None
        if prompt_tokens > 2:
            try:
                if request.group_id not in link.prompts:
                    link.prompts[request.group_id] = self._copy(link, self._engine.kv_layout(prompt_tokens - 2))
            except OSError:
                own.close()
                raise
            prompt = link.prompts[request.group_id]
            own.copied |= prompt_rows
        return _OutgoingSample(order, link, own, prompt, prompt_rows)

    def _copy(self, link: _Link, layout: Layout) -> _Copy:
        return _Copy(next(self._numbers), layout, None if link.address.machine == self._machine else link.outbox)

    def _copy_or_lose(self, sample_id: str, outgoing: _OutgoingSample, budget: int) -> int:
        """Copy about `budget` bytes of a sample and return how many; handles the loss of its destination."""
        started = time.perf_counter()
        try:
            copied = self._copy_some(sample_id, outgoing, budget)
        except OSError:
            self._lose(outgoing.link)
            return 0
        if copied >= self._engine.min_copy_bytes // 2:
            rate = copied / (time.perf_counter() - started)
            self._rate += 0.2 * (rate - self._rate)
        return copied

    def _copy_some(self, sample_id: str, outgoing: _OutgoingSample, budget: int) -> int:
        committed = self._engine.committed_positions(sample_id)
        if committed is None:  # an engine that decodes all the time has finished it while another was handed over
            return 0
        outgoing.deadline = min(outgoing.deadline, time.monotonic() + self._seconds)
        copied, own, prompt = 0, outgoing.own, outgoing.prompt
        if prompt is not None:
            copied += self._copy_positions(sample_id, prompt, outgoing.prompt_rows, budget)
        copied += self._copy_positions(sample_id, own, committed, budget - copied)
        outgoing.settled_bytes += copied
        outgoing.caught_up = own.covers(committed) and (prompt is None or prompt.covers(outgoing.prompt_rows))
        return copied

    def _copy_positions(self, sample_id: str, copy: _Copy, until: dict[str, int], budget: int) -> int:
        """Copy positions up to `until` of each part, about `budget` bytes at most; returns the bytes copied."""
        total, per_position = 0, self._engine.kv_layout(1)
        for part, last in until.items():
            first = copy.copied[part]
            if first >= last or total >= budget:
                continue
            rows = min(last - first, max(1, (budget - total) // per_position.bytes_of(part)))
            kv = self._engine.committed_kv(sample_id, part, first, first + rows)
            if kv.shape[3]:
                copy.write(part, kv)
                total += kv.nbytes
        return total

    # Stage two

    def _hand_over(self, link: _Link, order: MigrationOrder, outgoing: _OutgoingSample | None) -> None:
        """Send a sample; without `outgoing` it goes without KV, and the destination prefills it again."""
        sample_id, delta = order.sample_id, 0
        committed = self._engine.committed_positions(sample_id) if outgoing else None
        try:
            if outgoing and committed:
                delta = self._copy_positions(sample_id, outgoing.own, committed, 1 << 62)
            snapshot = self._engine.export_sample(sample_id, with_kv=False)
        except SilentEngineError:
            raise
        except (OSError, RunError) as error:
            if outgoing:
                outgoing.own.close()
            if isinstance(error, OSError):
                self._lose(link)
            self._keep(order, link)  # after a RunError: an engine that decodes all the time has just finished it
            return
        transfer = next(self._numbers)
        self._unacknowledged[transfer] = (link, snapshot, outgoing.own if outgoing else None)
        if outgoing is None:
            snapshot.draft = None
        elif snapshot.draft is not None:
            delta += snapshot.draft.features.nbytes
        try:
            link.outbox.send(self._arrival(transfer, order, snapshot, outgoing, delta))
        except OSError:
            self._lose(link)

    def _arrival(
        self,
        transfer: int,
        order: MigrationOrder,
        snapshot: SampleSnapshot,
        outgoing: _OutgoingSample | None,
        delta: int,
    ) -> Arrival:
        copies = [copy for copy in (outgoing.own, outgoing.prompt) if copy] if outgoing else []
        return Arrival(
            transfer=transfer,
            order=order.number,
            rollout=order.destination.rollout,
            snapshot=snapshot,
            staging=outgoing.own.number if outgoing else None,
            rows=outgoing.own.copied if outgoing else {},
            prompt=outgoing.prompt.number if outgoing and outgoing.prompt else None,
            prompt_rows=outgoing.prompt_rows if outgoing and outgoing.prompt else {},
            handles={copy.number: copy.handle for copy in copies if copy.handle},
            departed=self._boundary,
            settled_bytes=outgoing.settled_bytes if outgoing else 0,
            delta_bytes=delta,
        )

    def collect_acknowledgements(self) -> None:
        """Note which samples destinations have taken; takes back those that were sent to a dead destination."""
        for link in list(self._links.values()):
            try:
                self._read_acknowledgements(link)
            except OSError:
                self._lose(link)

    def _read_acknowledgements(self, link: _Link) -> None:
        for transfer in link.outbox.acknowledged():
            if transfer not in self._unacknowledged:
                continue  # of an earlier rollout
            _, snapshot, own = self._unacknowledged.pop(transfer)
            self.departed.append(snapshot.request.sample_id)
            if own is not None:
                own.close()

    def _lose(self, link: _Link) -> None:
        """A destination is gone: cancel its migrations, take back unacknowledged samples and prefill them again."""
        self._links.pop(link.address.name, None)
        with contextlib.suppress(OSError):
            self._read_acknowledgements(link)  # acknowledgements sent before its end still count
        link.outbox.close()
        for sample_id, outgoing in list(self._outgoing.items()):
            if outgoing.link is link:
                self._give_up(sample_id)
        for transfer, (other, snapshot, own) in list(self._unacknowledged.items()):
            if other is link:
                del self._unacknowledged[transfer]
                if own is not None:
                    own.close()
                snapshot.draft = None
                if not self._engine.has_sample(snapshot.request.sample_id):
                    self._engine.import_sample(snapshot)
                self.kept.append(snapshot.request.sample_id)
        prompts, link.prompts = link.prompts, {}
        for copy in prompts.values():
            copy.close()

    def _give_up(self, sample_id: str) -> None:
        """Cancel a migration whose KV is still being copied while the sample decodes; the sample stays here."""
        outgoing = self._outgoing.pop(sample_id)
        self._discard(outgoing.link, outgoing.own)
        self._keep(outgoing.order, outgoing.link)

    def _keep(self, order: MigrationOrder, link: _Link | None) -> None:
        """The sample stays here; the destination may wait for it."""
        self.kept.append(order.sample_id)
        if link is not None:
            self._tell(link, CalledOff(order.destination.rollout, order.number))

    def _discard(self, link: _Link, copy: _Copy) -> None:
        """Free the buffers of a copy at both ends."""
        copy.close()
        self._tell(link, FreeStaging(copy.number))

    def _tell(self, link: _Link, message: CalledOff | FreeStaging) -> None:
        """Send a message, unless the destination is gone."""
        if self._links.get(link.address.name) is link:
            try:
                link.outbox.send(message)
            except OSError:  # part of it may have been sent
                self._lose(link)
