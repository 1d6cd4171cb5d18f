"""Migrations of one engine: samples that it sends, samples that it receives, and its reports to the driver."""

from __future__ import annotations

from collections.abc import Sequence

from rlhfspec_mega.rollout.migration.arrivals import Arrivals
from rlhfspec_mega.rollout.migration.departures import Departures
from rlhfspec_mega.rollout.migration.messages import MigrationOrder, MigrationOrders
from rlhfspec_mega.rollout.migration.wire import Address, Inbox
from rlhfspec_mega.rollout.protocol import RolloutEngine
from rlhfspec_mega.types import MigrationReport


class MigrationAgent:
    """Sends and receives samples. The decoding thread calls it between decode steps.

    Args:
        host: address at which the other engines reach this machine.
        seconds: time limit of one migration, after which the sample stays.
    """

    def __init__(self, engine: RolloutEngine, host: str, seconds: float) -> None:
        self._inbox = Inbox(host)
        self._arrivals = Arrivals(engine, self._inbox)
        self._departures = Departures(engine, self._inbox.address.name, seconds)
        self._step_seconds = 0.0
        self._expected: list[int] = []

    @property
    def address(self) -> Address:
        """Where other engines send samples of the current rollout."""
        return self._inbox.address._replace(rollout=self._arrivals.rollout)

    @property
    def copy_seconds(self) -> float:
        """Time to copy one token's KV."""
        return self._departures.copy_seconds

    @property
    def busy(self) -> bool:
        """Whether samples are being sent, or were sent and not acknowledged."""
        return self._departures.busy

    @property
    def active(self) -> bool:
        """Whether there is something to do at a step boundary: samples are on their way from here or to here."""
        return self._departures.busy or self._arrivals.pending

    @property
    def expecting(self) -> bool:
        """Whether samples are on their way here."""
        return any(order not in self._arrivals.settled for order in self._expected)

    @property
    def asked(self) -> bool:
        """Whether the driver has asked for a report since the last one."""
        return self._arrivals.report_now

    @property
    def unacknowledged(self) -> int:
        """Number of samples that were sent and not acknowledged; they still count as this engine's."""
        return self._departures.unacknowledged

    def collect_acknowledgements(self) -> None:
        """Read other engines' acknowledgements, and forget the samples that they confirm to have taken over.

        A sample may migrate back to this engine only after that.
        """
        self._departures.collect_acknowledgements()

    def take_orders(self, orders: MigrationOrders) -> None:
        """Begin to carry out the driver's orders."""
        self._expected = orders.expected
        self._arrivals.drain_dead_sources(orders.dead_sources)
        self._begin(orders.moves)
        self._begin_sent()  # dead sources' messages may have come with orders among them

    def on_step_boundary(self) -> None:
        """Continue copies, hand over samples that are ready, take those that have arrived, and begin what was ordered
        meanwhile."""
        self._departures.on_step_boundary(self._step_seconds)
        self._arrivals.on_step_boundary()
        self._begin_sent()

    def record_step(self, started: float, seconds: float) -> None:
        """Note that a decode step has ended; `started` is in seconds since the epoch."""
        self._step_seconds = seconds
        self._arrivals.record_step(started, seconds)

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` for a message. For an engine that has nothing to decode."""
        self._arrivals.wait(seconds)
        self._begin_sent()

    def report(self) -> MigrationReport:
        """Outcome of migrations since the last call."""
        out, into = self._departures, self._arrivals
        into.report_now = False
        found = MigrationReport(out.departed, out.kept, into.arrived, into.landings, into.called_off)
        out.departed, out.kept, into.arrived, into.landings, into.called_off = [], [], [], [], []
        return found

    def end_rollout(self) -> None:
        """Discard all migrations under way: the rollout has ended or was abandoned."""
        self._departures.end_rollout()
        self._arrivals.end_rollout()

    def close(self) -> None:
        """End all connections."""
        self._departures.close()
        self._inbox.close()

    def _begin_sent(self) -> None:
        """Begin to carry out the orders that the driver has sent meanwhile."""
        orders, self._arrivals.orders = self._arrivals.orders, []
        self._begin(orders)

    def _begin(self, orders: Sequence[MigrationOrder]) -> None:
        for order in orders:
            self._departures.order(order)
