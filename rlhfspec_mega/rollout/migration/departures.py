"""The source's side: copies settled KV between decode steps, then hands samples over at a step boundary."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from dataclasses import dataclass, field

import torch

from rlhfspec_mega.errors import RunError, SilentEngineError
from rlhfspec_mega.rollout.migration.messages import Arrival, Dropped, MigrationOrder, Piece
from rlhfspec_mega.rollout.migration.staging import Handle, Layout, Staging
from rlhfspec_mega.rollout.migration.wire import Address, Outlet, this_machine
from rlhfspec_mega.rollout.protocol import RolloutEngine, SampleSnapshot

COPY_SHARE = 0.05  # of the time of decoding may go into copying
FIRST_RATE = 1e9  # bytes per second of copying, until it is measured


class _Copy:
    """KV on its way to one destination, written in pieces between decode steps.

    Args:
        outlet: where pieces go into memory of the destination; None: into shared memory, of which it learns when the
            sample comes.

    Attributes:
        copied: positions so far, by part.
    """

    def __init__(self, number: int, layout: Layout, outlet: Outlet | None) -> None:
        self.number, self._layout, self._outlet = number, layout, outlet
        self._shared = None if outlet else Staging.shared(layout)
        self.copied = dict.fromkeys(layout.parts, 0)

    @property
    def handle(self) -> Handle | None:
        return self._shared.handle if self._shared else None

    def covers(self, wanted: dict[str, int]) -> bool:
        return all(self.copied[part] >= count for part, count in wanted.items())

    def write(self, part: str, piece: torch.Tensor) -> None:
        """The next positions: [layers, 2, kv_heads, rows, head_dim]. Raises OSError when the destination is gone."""
        first, rows = self.copied[part], piece.shape[3]
        if self._shared:
            self._shared.parts[part][:, :, :, first : first + rows] = piece
        elif self._outlet:
            payload = piece.contiguous().cpu().view(torch.uint8).numpy().reshape(-1).data
            self._outlet.send(Piece(self.number, self._layout, part, first, rows), payload)
        self.copied[part] += rows

    def close(self) -> None:
        """Give shared memory back: the destination has opened it, or never will."""
        if self._shared:
            self._shared.close()


@dataclass
class _Link:
    """A destination: its connection, and what of prompts was sent there already."""

    address: Address
    outlet: Outlet
    prompts: dict[str, _Copy] = field(default_factory=dict)


@dataclass
class _Leaving:
    """A sample in stage one.

    Attributes:
        prompt_rows: positions that its group's prompt has in common, by part; copied once for all members.
        deadline: to be gone, time.monotonic(); from the first byte copied on, as copies wait for each other.
        caught_up: all that was settled at the last step boundary is copied: the next one hands the sample over.
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
    """Samples on their way out of one engine.

    Copying takes turns between decode steps, each a small share of a step's time, oldest order first. A sample whose
    settled KV was copied to the last position leaves at the next step boundary: what it gained since, its tokens and
    the states its draft has not read are the short rest. It stays the source's until the destination has acknowledged.

    Args:
        name: of this engine's process.
        seconds: a copy that takes longer comes to nothing.
    """

    def __init__(self, engine: RolloutEngine, name: str, seconds: float) -> None:
        self._engine, self._name, self._seconds = engine, name, seconds
        self._machine = this_machine()
        self._links: dict[str, _Link] = {}
        self._leaving: dict[str, _Leaving] = {}
        self._unacknowledged: dict[int, tuple[_Link, SampleSnapshot, _Copy | None]] = {}
        self._unreachable: set[str] = set()  # in this rollout
        self._numbers = itertools.count()
        self._rate = FIRST_RATE
        self._boundary = 0.0  # when the last step ended, since the epoch
        self.departed: list[str] = []
        self.kept: list[str] = []

    @property
    def busy(self) -> bool:
        return bool(self._leaving or self._unacknowledged)

    @property
    def copy_seconds(self) -> float:
        return self._engine.kv_layout(1).bytes / self._rate

    @property
    def undecided(self) -> int:
        return len(self._unacknowledged)

    def order(self, order: MigrationOrder) -> None:
        """Begin to send a sample away; one that is unknown or ended stays where it is."""
        self._boundary = time.time()
        if not self._engine.holds(order.sample_id) or order.sample_id in self._leaving:
            self.kept.append(order.sample_id)
            return
        link = self._link(order.destination)
        settled = self._engine.settled(order.sample_id)
        if link is None:
            self.kept.append(order.sample_id)
        elif settled is None or 2 * self.copy_seconds >= order.prefill_seconds:  # written and read, or computed anew
            self._hand_over(link, order, None)
        else:
            self._engine.read_ahead([order.sample_id])
            try:
                self._leaving[order.sample_id] = self._begin(order, link)
            except OSError:  # no memory to copy to, or too many open files
                self._hand_over(link, order, None)

    def turn(self, step_seconds: float) -> None:
        """At a step boundary: hand over what is ready, copy for a share of the time of a step."""
        self._boundary = time.time()
        self.collect()
        for sample_id, one in list(self._leaving.items()):
            if self._leaving.get(sample_id) is not one:
                continue  # given up with another that went to the same destination
            if not self._engine.holds(sample_id) or time.monotonic() > one.deadline:
                self._give_up(sample_id)
            elif one.caught_up:
                del self._leaving[sample_id]
                self._hand_over(one.link, one.order, one)
        budget = max(self._engine.least_copy, int(COPY_SHARE * step_seconds * self._rate))
        for sample_id, one in list(self._leaving.items()):
            if budget <= 0:
                return
            if self._leaving.get(sample_id) is one and not one.caught_up:
                budget -= self._guarded(sample_id, one, budget)

    def forget(self) -> None:
        """The rollout is over or was given up: nothing is copied any more."""
        for _, _, own in self._unacknowledged.values():
            if own is not None:
                own.close()
        self._unacknowledged.clear()
        self.collect()
        for sample_id in list(self._leaving):
            self._give_up(sample_id)
        for link in list(self._links.values()):
            for copy in link.prompts.values():
                self._discard(link, copy)
            link.prompts.clear()
        self._unreachable.clear()
        self.departed, self.kept = [], []

    def close(self) -> None:
        self.forget()
        for link in self._links.values():
            link.outlet.close()
        self._links.clear()

    # Stage one

    def _link(self, address: Address) -> _Link | None:
        if address.name in self._unreachable:
            return None
        if address.name not in self._links:
            try:
                self._links[address.name] = _Link(address, Outlet(address, self._name))
            except OSError:  # it has just died: the driver finds out by itself
                self._unreachable.add(address.name)
                return None
        return self._links[address.name]

    def _begin(self, order: MigrationOrder, link: _Link) -> _Leaving:
        request, settled = self._engine.request(order.sample_id), self._engine.settled(order.sample_id) or {}
        prompt_tokens = len(request.prompt_tokens)
        # Its whole length may come to be copied; memory that is not written costs nothing.
        own = self._copy(link, self._engine.kv_layout(prompt_tokens + request.max_new_tokens))
        # The last prompt token is a decode step's input, and the draft's newest entry may still be missing.
        prompt_rows = {part: min(count, prompt_tokens - 2) for part, count in settled.items()}
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
        return _Leaving(order, link, own, prompt, prompt_rows)

    def _copy(self, link: _Link, layout: Layout) -> _Copy:
        return _Copy(next(self._numbers), layout, None if link.address.machine == self._machine else link.outlet)

    def _guarded(self, sample_id: str, one: _Leaving, budget: int) -> int:
        """Bytes copied; a destination that is gone gets no more samples."""
        started = time.perf_counter()
        try:
            copied = self._copy_some(sample_id, one, budget)
        except OSError:
            self._lose(one.link)
            return 0
        if copied >= self._engine.least_copy // 2:
            rate = copied / (time.perf_counter() - started)
            self._rate += 0.2 * (rate - self._rate)
        return copied

    def _copy_some(self, sample_id: str, one: _Leaving, budget: int) -> int:
        settled = self._engine.settled(sample_id)
        if settled is None:  # it ended while another was handed over, in an engine that decodes all the time
            return 0
        one.deadline = min(one.deadline, time.monotonic() + self._seconds)
        copied = 0
        if one.prompt is not None:
            copied += self._advance(sample_id, one.prompt, one.prompt_rows, budget)
        copied += self._advance(sample_id, one.own, settled, budget - copied)
        one.settled_bytes += copied
        one.caught_up = one.own.covers(settled) and (one.prompt is None or one.prompt.covers(one.prompt_rows))
        return copied

    def _advance(self, sample_id: str, copy: _Copy, until: dict[str, int], budget: int) -> int:
        """Copy positions up to `until`, for about so many bytes; bytes copied."""
        total, one = 0, self._engine.kv_layout(1)
        for part, last in until.items():
            first = copy.copied[part]
            if first >= last or total >= budget:
                continue
            rows = min(last - first, max(1, (budget - total) // one.bytes_of(part)))
            kv = self._engine.settled_kv(sample_id, part, first, first + rows)
            if kv.shape[3]:
                copy.write(part, kv)
                total += kv.nbytes
        return total

    # Stage two

    def _hand_over(self, link: _Link, order: MigrationOrder, one: _Leaving | None) -> None:
        sample_id, delta = order.sample_id, 0
        settled = self._engine.settled(sample_id) if one else None
        try:
            if one and settled:
                delta = self._advance(sample_id, one.own, settled, 1 << 62)
            snapshot = self._engine.export_sample(sample_id, with_kv=False)
        except SilentEngineError:
            raise
        except (OSError, RunError) as error:
            if one:
                one.own.close()
            self.kept.append(sample_id)
            if isinstance(error, OSError):  # else it ended just now, in an engine that decodes all the time
                self._lose(link)
            return
        transfer = next(self._numbers)
        self._unacknowledged[transfer] = (link, snapshot, one.own if one else None)
        if one is None:
            snapshot.draft = None
        elif snapshot.draft is not None:
            delta += snapshot.draft.features.nbytes
        try:
            link.outlet.send(self._arrival(transfer, order, snapshot, one, delta))
        except OSError:
            self._lose(link)

    def _arrival(
        self, transfer: int, order: MigrationOrder, snapshot: SampleSnapshot, one: _Leaving | None, delta: int
    ) -> Arrival:
        copies = [copy for copy in (one.own, one.prompt) if copy] if one else []
        return Arrival(
            transfer=transfer,
            rollout=order.destination.rollout,
            snapshot=snapshot,
            staging=one.own.number if one else None,
            rows=one.own.copied if one else {},
            prompt=one.prompt.number if one and one.prompt else None,
            prompt_rows=one.prompt_rows if one and one.prompt else {},
            handles={copy.number: copy.handle for copy in copies if copy.handle},
            departed=self._boundary,
            settled_bytes=one.settled_bytes if one else 0,
            delta_bytes=delta,
        )

    def collect(self) -> None:
        """Samples that destinations hold now, and those that a dead one will never have taken."""
        for link in list(self._links.values()):
            try:
                self._read_acknowledgements(link)
            except OSError:
                self._lose(link)

    def _read_acknowledgements(self, link: _Link) -> None:
        for transfer in link.outlet.acknowledged():
            if transfer not in self._unacknowledged:
                continue  # of a rollout that was given up
            _, snapshot, own = self._unacknowledged.pop(transfer)
            self.departed.append(snapshot.request.sample_id)
            if own is not None:
                own.close()

    def _lose(self, link: _Link) -> None:
        """A destination is gone: its samples stay, those not acknowledged come back and are prefilled again."""
        self._links.pop(link.address.name, None)
        with contextlib.suppress(OSError):
            self._read_acknowledgements(link)  # what came before the end still counts
        link.outlet.close()
        for sample_id, one in list(self._leaving.items()):
            if one.link is link:
                self._give_up(sample_id)
        for transfer, (other, snapshot, own) in list(self._unacknowledged.items()):
            if other is link:
                del self._unacknowledged[transfer]
                if own is not None:
                    own.close()
                snapshot.draft = None
                if not self._engine.holds(snapshot.request.sample_id):
                    self._engine.import_sample(snapshot)
                self.kept.append(snapshot.request.sample_id)
        for copy in link.prompts.values():
            copy.close()

    def _give_up(self, sample_id: str) -> None:
        one = self._leaving.pop(sample_id)
        self._discard(one.link, one.own)
        self.kept.append(sample_id)

    def _discard(self, link: _Link, copy: _Copy) -> None:
        """Free memory here and there."""
        copy.close()
        with contextlib.suppress(OSError):  # a destination that is gone has no memory either
            link.outlet.send(Dropped(copy.number))
