"""Which engines have which samples, who owns each, what moves, and what the death of an engine makes of it all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlhfspec_mega.errors import RunError
from rlhfspec_mega.ledger.entry import Entry, Transfer, find, first_five
from rlhfspec_mega.types import SampleState


class Custody:
    """Samples of the ledger at engines. Time O(1) per sample; for an engine, O(samples it has or that move).

    An engine holds a sample from being given it until it returns it. A sample that moves is held by its source until
    that reports it departed, and by its destination from the report of its arrival on: in between by both or by none,
    as reports come in any order. Its owner, whose result counts, is one engine at a time.

    A sample whose source died may be there, at the destination, or on the wire between: that is open until the
    destination has taken all that the dead source had sent (`cut`).
    """

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        self._held: dict[int, dict[str, None]] = {}  # ids by engine; copies without an owner outlive their entries
        self._moving: dict[str, Entry] = {}  # those with a transfer

    # Questions

    def held(self, rank: int) -> int:
        """Samples that an engine has."""
        return len(self._held.get(rank, ()))

    def owner(self, sample_id: str) -> int | None:
        """The engine whose result counts."""
        return find(self._entries, sample_id).owner

    def moves(self, sample_id: str) -> bool:
        """Whether a sample is on its way between engines."""
        return sample_id in self._moving

    def destination(self, sample_id: str) -> int | None:
        """Where a sample is going; None if it is not under way."""
        entry = self._moving.get(sample_id)
        return entry.transfer.destination if entry and entry.transfer else None

    def leads_to(self, rank: int) -> bool:
        """Whether samples are on their way to an engine."""
        return any(transfer.destination == rank for _, transfer in self._transfers())

    def open_sources(self, rank: int) -> list[int]:
        """Dead engines that had been told to send samples to this one."""
        found = (t.source for _, t in self._transfers() if t.orphaned and t.destination == rank)
        return sorted({source for source in found if source is not None})

    # What is done, and what engines report

    def give(self, rank: int, sample_ids: Sequence[str], repeat: bool = False) -> None:
        """Hand samples over to an engine, which owns them from here on: all, or none if one is refused.

        Args:
            repeat: samples that have ended may be among them, to be decoded again; that does not count.

        Raises:
            RunError: a sample is not open, or generated already.
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
        """An engine returns a sample that has ended; whether that counts, which it does of the owner only.

        Raises RunError for a sample that the engine does not hold.
        """
        held, entry = self._held.get(rank, {}), self._entries.get(sample_id)
        if sample_id not in held:
            what = "came back twice from" if entry and not _ungenerated(entry) else "was never given to"
            raise RunError(f"Sample {sample_id} {what} engine {rank}.")
        del held[sample_id]
        if entry is None or entry.owner != rank:
            return False  # it was decoded again, or a move failed halfway and left it with both engines
        entry.owner = None
        entry.move(SampleState.FINISHED)
        if entry.transfer and entry.transfer.source == rank:  # the order came to nothing
            self._end(entry)
        return True

    def order(self, sample_id: str, source: int, destination: int) -> None:
        """The source is being told to send a sample of its own to the destination."""
        entry = self._moving[sample_id] = find(self._entries, sample_id)
        entry.transfer = Transfer(source, destination)

    def kept(self, sample_id: str) -> None:
        """An order came to nothing."""
        if entry := self._moving.get(sample_id):
            self._end(entry)

    def departed(self, rank: int, sample_id: str) -> bool:
        """The source reports that the destination took the sample; whether it is lost, that having died meanwhile.

        Raises RunError for a sample that it was not told to send.
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
        """The destination reports the sample, which it owns from here on; false if that has ended meanwhile."""
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
        """An engine says how many samples it holds. Raises RunError unless they are as many as it was given."""
        held = self._held.get(rank, {})
        if unfinished != len(held):
            raise RunError(
                f"Engine {rank} holds {unfinished} samples and was given {len(held)} that it has not returned, "
                f"among them {first_five(held)}: it has lost samples."
            )

    # What dies

    def cut(self, source: int, destination: int) -> list[str]:
        """The destination has taken what the dead source had sent; samples that were not among it."""
        lost = [e for e, t in self._transfers() if t.orphaned and (t.source, t.destination) == (source, destination)]
        for entry in lost:
            self._end(entry)
        return [entry.id for entry in lost]

    def lose(self, rank: int) -> list[str]:
        """An engine died. What it owned is PENDING; ids of samples that no engine can have now."""
        held = [self._entries[sample_id] for sample_id in self._held.pop(rank, ()) if sample_id in self._entries]
        owned = [entry for entry in held if entry.owner == rank]
        for entry in [*owned, *(moving for moving in self._moving.values() if moving.owner == rank)]:
            entry.owner = None
            entry.move(SampleState.PENDING)
        lost = list[Entry]()
        for entry in owned:
            transfer = entry.transfer
            if transfer and transfer.source == rank and transfer.destination is not None:
                transfer.orphaned = True
            else:
                lost.append(entry)
        for entry, transfer in self._transfers():
            if transfer.orphaned and transfer.destination == rank:
                lost.append(entry)
                self._end(entry)
            elif transfer.orphaned:
                continue
            elif transfer.source == rank:  # nobody will report the departure any more
                self._end(entry)
            elif transfer.destination == rank and not transfer.arrived:
                transfer.destination = None
                if transfer.source is None:
                    lost.append(entry)
                    self._end(entry)
        return [entry.id for entry in lost]

    def end(self) -> None:
        """Engines have nothing any more: what had not ended is PENDING."""
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
        """The sample is no longer under way."""
        entry.transfer = None
        del self._moving[entry.id]


def _ungenerated(entry: Entry) -> bool:
    return entry.state in (SampleState.PENDING, SampleState.GENERATING)
