"""Which engines hold which samples, which engine owns each, transfers between engines, and deaths of engines."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.ledger.entry import Entry, Transfer, find, first_five
from rlhfspec_mega.types import SampleState


class Custody:
    """Samples at engines. Time O(1) per sample; per engine, O(samples that it holds or that are in transfer).

    An engine holds a sample from the time it is given the sample until it returns it. During a transfer the source
    holds it until it reports the departure, and the destination from its report of the arrival on; since reports arrive
    in any order, both or neither may hold it meanwhile. One engine at a time is the owner, whose result counts.

    If a source dies, a sample in transfer may be at the source, at the destination or on the wire. That is open until
    the destination has received everything that the dead source had sent (`cut`).
    """

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        self._held: dict[int, dict[str, None]] = {}  # ids by engine; an engine's copy may outlive the entry
        self._moving: dict[str, Entry] = {}  # entries in transfer
        self._numbers = itertools.count()

    # Questions

    def held(self, rank: int) -> int:
        """Samples that an engine holds."""
        return len(self._held.get(rank, ()))

    def owner(self, sample_id: str) -> int | None:
        """The engine whose result for this sample counts."""
        return find(self._entries, sample_id).owner

    def moves(self, sample_id: str) -> bool:
        """Whether a sample is in transfer between engines."""
        return sample_id in self._moving

    def destination(self, sample_id: str) -> int | None:
        """Destination of a sample in transfer; None otherwise."""
        entry = self._moving.get(sample_id)
        return entry.transfer.destination if entry and entry.transfer else None

    def expected(self, rank: int) -> list[int]:
        """Numbers of the orders by which samples are on their way to an engine that has not reported them yet.

        Those of a dead source count until the engine has received everything that it had sent.
        """
        found = (t for _, t in self._transfers() if t.destination == rank and not t.arrived)
        return [transfer.number for transfer in found if transfer.orphaned or not transfer.called_off]

    def open_sources(self, rank: int) -> list[int]:
        """Dead engines that had been ordered to send samples to this one."""
        found = (t.source for _, t in self._transfers() if t.orphaned and t.destination == rank)
        return sorted({source for source in found if source is not None})

    # What is done, and what engines report

    def give(self, rank: int, sample_ids: Sequence[str], repeat: bool = False) -> None:
        """Hand samples over to an engine, which owns them from now on: all, or none if one is refused.

        Args:
            repeat: finished samples may be among them, to be decoded again; their results do not count.

        Raises:
            RunError: a sample is not open, or already generated.
        """
        entries = [find(self._entries, sample_id) for sample_id in sample_ids]
        for entry in entries:
            if not _ungenerated(entry) and not (repeat and entry.state is SampleState.FINISHED):
                raise RunError(f"Sample {entry} cannot be given to engine {rank}: it is generated already.")
        held = self._held.setdefault(rank, {})
        for entry in entries:
            if entry.id in held and entry.transfer:
                entry.transfer.returned = True
            held[entry.id] = None
            if _ungenerated(entry):
                entry.owner = rank
                entry.move(SampleState.GENERATING)

    def finished(self, rank: int, sample_id: str) -> bool:
        """An engine returns a finished sample; returns whether the result counts, which only the owner's does.

        Raises RunError for a sample that the engine does not hold.
        """
        held, entry = self._held.get(rank, {}), self._entries.get(sample_id)
        if sample_id not in held:
            what = "came back twice from" if entry and not _ungenerated(entry) else "was never given to"
            raise RunError(f"Sample {sample_id} {what} engine {rank}.")
        del held[sample_id]
        if entry is None or entry.owner != rank:
            return False  # decoded again, or left with both engines by a failed migration
        entry.owner = None
        entry.move(SampleState.FINISHED)
        if entry.transfer and entry.transfer.source == rank:  # the migration did not take place
            self._end(entry)
        return True

    def order(self, sample_id: str, source: int, destination: int) -> int:
        """The source has been ordered to send a sample that it owns to the destination; returns the order's number."""
        entry = self._moving[sample_id] = find(self._entries, sample_id)
        entry.transfer = Transfer(next(self._numbers), source, destination)
        return entry.transfer.number

    def called_off(self, orders: Collection[int]) -> None:
        """Destinations report that the samples of these orders do not come; their sources will say the same."""
        for _, transfer in self._transfers() if orders else ():
            transfer.called_off |= transfer.number in orders

    def kept(self, sample_id: str) -> None:
        """The source reports that an ordered migration did not take place."""
        if entry := self._moving.get(sample_id):
            self._end(entry)

    def departed(self, rank: int, sample_id: str) -> bool:
        """The source reports that the destination took the sample.

        Returns True if the sample is lost because the destination has died meanwhile.

        Raises RunError for a sample that it was not ordered to send.
        """
        entry = self._moving.get(sample_id)
        if entry is None or entry.transfer is None:
            raise RunError(f"Engine {rank} sent sample {sample_id} away, which it had not been told to.")
        transfer = entry.transfer
        if not transfer.returned:
            del self._held[rank][sample_id]
        if transfer.arrived or transfer.destination is None:
            self._end(entry)
            return not transfer.arrived
        transfer.source = None
        return False

    def arrived(self, rank: int, sample_id: str) -> bool:
        """The destination reports the sample and owns it from now on.

        Returns False if the sample has finished meanwhile.
        """
        entry = self._entries.get(sample_id)
        self._held.setdefault(rank, {})[sample_id] = None
        if entry is None or not _ungenerated(entry):
            return False
        entry.owner = rank
        entry.move(SampleState.GENERATING)
        if transfer := entry.transfer:
            if transfer.orphaned or transfer.source is None:
                self._end(entry)
            else:
                transfer.arrived = True
        return True

    def balance(self, rank: int, unfinished: int) -> None:
        """Check how many samples an engine says it holds. Raises RunError unless they are as many as it was given."""
        held = self._held.get(rank, {})
        if unfinished != len(held):
            raise RunError(
                f"Engine {rank} holds {unfinished} samples and was given {len(held)} that it has not returned, "
                f"among them {first_five(held)}: it has lost samples."
            )

    # What dies

    def cut(self, source: int, destination: int) -> list[str]:
        """The destination has received everything the dead source had sent.

        Returns the samples that were not among it.
        """
        lost = [e for e, t in self._transfers() if t.orphaned and (t.source, t.destination) == (source, destination)]
        for entry in lost:
            self._end(entry)
        return [entry.id for entry in lost]

    def lose(self, rank: int) -> list[str]:
        """An engine died: samples that it owned become PENDING. Returns the ids that no engine can hold any more."""
        held = [self._entries[sample_id] for sample_id in self._held.pop(rank, ()) if sample_id in self._entries]
        owned = [entry for entry in held if entry.owner == rank]
        for entry in [*owned, *(moving for moving in self._moving.values() if moving.owner == rank)]:
            entry.owner = None
            entry.move(SampleState.PENDING)
        lost = list[Entry]()
        for entry in owned:
            transfer = entry.transfer
            leads = transfer is not None and transfer.destination is not None and not transfer.called_off
            if transfer and transfer.source == rank and leads:
                transfer.orphaned = True
            else:
                lost.append(entry)
        for entry, transfer in self._transfers():
            if transfer.orphaned and transfer.destination == rank:
                lost.append(entry)
                self._end(entry)
            elif transfer.orphaned:
                continue
            elif transfer.source == rank:  # the dead source will not report the departure
                self._end(entry)
            elif transfer.destination == rank and not transfer.arrived:
                transfer.destination = None
                if transfer.source is None:
                    lost.append(entry)
                    self._end(entry)
        return [entry.id for entry in lost]

    def end(self) -> None:
        """Engines hold nothing any more: unfinished samples become PENDING."""
        for entry in self._entries.values():
            if entry.state is SampleState.GENERATING:
                entry.owner = None
                entry.move(SampleState.PENDING)
        for entry, _ in self._transfers():
            self._end(entry)
        self._held.clear()

    def _transfers(self) -> list[tuple[Entry, Transfer]]:
        return [(entry, entry.transfer) for entry in self._moving.values() if entry.transfer]

    def _end(self, entry: Entry) -> None:
        """End the sample's transfer."""
        entry.transfer = None
        del self._moving[entry.id]


def _ungenerated(entry: Entry) -> bool:
    return entry.state in (SampleState.PENDING, SampleState.GENERATING)
