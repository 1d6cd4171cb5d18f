"""The driver's connections to engines, on which it reaches them while they decode."""

from __future__ import annotations

from collections.abc import Iterable

from rlhfspec_mega.rollout.migration.messages import MigrationOrder, Moves, ReportNow
from rlhfspec_mega.rollout.migration.wire import Address, Outbox

_NAME = "driver"
_CONNECT_SECONDS = 1.0  # an engine's machine answers at once, or not at all


class DriverLines:
    """One connection to each engine that takes part in migrations.

    Without one, an engine reports when its time is over, and gets its orders with its next call.
    """

    def __init__(self) -> None:
        self._lines: dict[str, Outbox] = {}  # by the engine process's name
        self._in_vain = set[str]()  # names of engines that cannot be connected to

    def open(self, addresses: Iterable[Address]) -> None:
        """Connect to these engines, which have just answered; other connections are closed."""
        wanted = {address.name: address for address in addresses}
        for name in self._lines.keys() - wanted.keys():
            self._lines.pop(name).close()
        for name in wanted.keys() - self._lines.keys() - self._in_vain:
            try:
                self._lines[name] = Outbox(wanted[name], _NAME, _CONNECT_SECONDS)
            except TimeoutError:  # those on other machines are tried before the next rollout
                self._in_vain |= {one.name for one in wanted.values() if one.host == wanted[name].host}
                return
            except OSError:
                self._in_vain.add(name)

    def order(self, address: Address, orders: list[MigrationOrder]) -> bool:
        """Send orders to an engine; returns whether they are on their way."""
        return self._send(address, Moves(address.rollout, orders))

    def ask(self, address: Address) -> bool:
        """Ask an engine for a report; returns whether that is on its way."""
        return self._send(address, ReportNow(address.rollout))

    def _send(self, address: Address, message: Moves | ReportNow) -> bool:
        line = self._lines.get(address.name)
        if line is None:
            return False
        try:
            line.send(message)
        except OSError:  # it has died, or reads nothing any more
            self._lines.pop(address.name).close()
            return False
        return True
