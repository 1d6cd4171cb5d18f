"""One engine's part in migrations: what it sends, what it takes, and what the driver is told of both."""

from __future__ import annotations

from rlhfspec_mega.rollout.migration.arrivals import Arrivals
from rlhfspec_mega.rollout.migration.departures import Departures
from rlhfspec_mega.rollout.migration.messages import Orders
from rlhfspec_mega.rollout.migration.wire import Address, Inbox
from rlhfspec_mega.rollout.protocol import RolloutEngine
from rlhfspec_mega.types import MigrationReport


class MigrationAgent:
    """Called between decode steps, by the thread that decodes.

    Args:
        host: address of this machine for the other engines.
        seconds: in which a sample is copied and gone, or stays.
    """

    def __init__(self, engine: RolloutEngine, host: str, seconds: float) -> None:
        self._inbox = Inbox(host)
        self._arrivals = Arrivals(engine, self._inbox)
        self._departures = Departures(engine, self._inbox.address.name, seconds)
        self._step_seconds = 0.0

    @property
    def address(self) -> Address:
        """Where to send samples of the rollout of now."""
        return self._inbox.address._replace(rollout=self._arrivals.rollout)

    @property
    def copy_seconds(self) -> float:
        """To copy one token's KV."""
        return self._departures.copy_seconds

    @property
    def busy(self) -> bool:
        """Whether samples are on their way out, unacknowledged ones included."""
        return self._departures.busy

    @property
    def undecided(self) -> int:
        """Samples sent that no other engine has acknowledged: they count as this engine's."""
        return self._departures.undecided

    def collect(self) -> None:
        """Take note of samples that others hold by now: they may be given to this engine again."""
        self._departures.collect()

    def follow(self, orders: Orders) -> None:
        """Begin what the driver asks for."""
        self._arrivals.cut(orders.cut)
        for order in orders.moves:
            self._departures.order(order)

    def turn(self) -> None:
        """At a step boundary."""
        self._departures.turn(self._step_seconds)
        self._arrivals.turn()

    def stepped(self, started: float, seconds: float) -> None:
        """A decode step was taken; `started` in seconds since the epoch."""
        self._step_seconds = seconds
        self._arrivals.stepped(started, seconds)

    def wait(self, seconds: float) -> None:
        """With nothing to decode: wait so long for a sample to come."""
        self._arrivals.wait(seconds)

    def report(self) -> MigrationReport:
        """What became of migrations since the last call."""
        out, into = self._departures, self._arrivals
        found = MigrationReport(out.departed, out.kept, into.arrived, into.landings)
        out.departed, out.kept, into.arrived, into.landings = [], [], [], []
        return found

    def forget(self) -> None:
        """The rollout is over or was given up."""
        self._departures.forget()
        self._arrivals.forget()

    def close(self) -> None:
        """End all connections."""
        self._departures.close()
        self._inbox.close()
