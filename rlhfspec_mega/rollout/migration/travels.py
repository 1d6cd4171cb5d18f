"""What the driver knows of samples under way between engines, and what the death of either end makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class _Travel:
    """A sample that was told to move.

    Attributes:
        destination: None once that is dead: then only the source can still have the sample.
        source: None once it has reported the departure.
        arrived: the destination has reported the sample; the source's report is still to come.
    """

    source: int | None
    destination: int | None
    arrived: bool = False


class Travels:
    """Orders that engines have not answered for yet.

    Source and destination report in any order. A sample whose source died may be there, at the destination, or on the
    wire between: that is open until the destination has taken all that the dead source had sent (`cut`).
    """

    def __init__(self) -> None:
        self._travels: dict[str, _Travel] = {}
        self._open: dict[str, _Travel] = {}  # of dead sources, by sample

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self._travels or sample_id in self._open

    def order(self, sample_id: str, source: int, destination: int) -> None:
        """The source is being told to send a sample of its own to the destination."""
        self._travels[sample_id] = _Travel(source, destination)

    def destination(self, sample_id: str) -> int | None:
        """Where a sample is going; None if it is not under way."""
        travel = self._travels.get(sample_id) or self._open.get(sample_id)
        return None if travel is None else travel.destination

    def destinations(self) -> set[int]:
        """Engines that samples are on their way to."""
        travels = (*self._travels.values(), *self._open.values())
        return {travel.destination for travel in travels if travel.destination is not None}

    def leads_to(self, rank: int) -> bool:
        """Whether samples are on their way to an engine."""
        return rank in self.destinations()

    def departed(self, sample_id: str) -> bool:
        """The source reports that the destination took the sample; whether it is lost, that having died meanwhile."""
        travel = self._travels[sample_id]
        if travel.arrived or travel.destination is None:
            del self._travels[sample_id]
            return not travel.arrived
        travel.source = None
        return False

    def arrived(self, sample_id: str) -> None:
        """The destination reports the sample; the source's report of the departure may be still to come."""
        self._open.pop(sample_id, None)
        travel = self._travels.get(sample_id)
        if travel is not None and travel.source is None:
            del self._travels[sample_id]
        elif travel is not None:
            travel.arrived = True

    def kept(self, sample_id: str) -> None:
        """The order came to nothing."""
        self._travels.pop(sample_id, None)

    def ended(self, sample_id: str, rank: int) -> None:
        """The sample has ended on this engine; if that was its source, the order came to nothing."""
        travel = self._travels.get(sample_id)
        if travel is not None and travel.source == rank:
            del self._travels[sample_id]

    def open_sources(self, rank: int) -> list[int]:
        """Dead engines that had been told to send samples to this one."""
        return sorted({t.source for t in self._open.values() if t.destination == rank and t.source is not None})

    def cut(self, source: int, destination: int) -> list[str]:
        """The destination has taken what the dead source had sent; samples that were not among it."""
        lost = [i for i, t in self._open.items() if (t.source, t.destination) == (source, destination)]
        for sample_id in lost:
            del self._open[sample_id]
        return lost

    def lose(self, rank: int, own: Sequence[str]) -> list[str]:
        """An engine died that owned these samples; those, and others, that no engine can have now."""
        lost = []
        for sample_id in own:
            travel = self._travels.get(sample_id)
            if travel is not None and travel.source == rank and travel.destination is not None:
                self._open[sample_id] = self._travels.pop(sample_id)
            else:
                lost.append(sample_id)
        for sample_id, travel in list(self._open.items()):
            if travel.destination == rank:
                del self._open[sample_id]
                lost.append(sample_id)
        for sample_id, travel in list(self._travels.items()):
            if travel.source == rank:
                del self._travels[sample_id]  # nobody will report the departure any more
            elif travel.destination == rank and not travel.arrived:
                if travel.source is None:
                    del self._travels[sample_id]
                    lost.append(sample_id)
                travel.destination = None
        return lost
