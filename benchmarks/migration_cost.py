"""What a migration costs: how long a sample stands still, what is copied meanwhile, what copying takes from others."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from benchmarks.rollout_fleet import Fleet, LoadedEngine
from rlhfspec_mega.rollout.migration.messages import MigrationOrder, MigrationOrders
from rlhfspec_mega.rollout.migration.wire import Address
from rlhfspec_mega.rollout.protocol import SampleSnapshot
from rlhfspec_mega.types import GenerationRequest, Landing

LONG = 300  # tokens copied in stage one from which on the share of stage two is judged
ALWAYS = -1  # number of no order: an engine that expects it never stops waiting
WARM_UP = 0.05  # seconds in which samples get their slots; a small model makes 40 tokens of each in that time


@dataclass
class MigrationFigures:
    """Of many migrations of a few long samples between two engines.

    Attributes:
        downtime_steps: from the last step at the source to the first at the destination, in steps of the latter.
        delta_share: bytes of stage two over those of stage one, of samples longer than LONG.
    """

    downtime_steps: list[float]
    downtime_seconds: list[float]
    delta_share: list[float]


class CopyingEngine(LoadedEngine):
    """An engine that can copy KV for another one again and again, without ever handing a sample over."""

    def token_bytes(self) -> int:
        """KV of one token."""
        return self.engine.kv_layout(1).bytes

    def decode_rate(self, steps: int, destination: Address | None) -> float:
        """Tokens per second over so many steps, while samples are copied one after the other or not at all."""
        assert self.migration is not None
        departures, tokens = self.migration._departures, self.engine.stats()["generated_tokens"]
        ids = [sample.request.sample_id for sample in self.engine._scheduler.active]
        started, last = time.perf_counter(), 0.0
        for step in range(steps):
            if destination is not None:
                if not departures._outgoing:
                    departures.order(MigrationOrder(step, ids[step % len(ids)], destination))
                departures.on_step_boundary(last)
                for sample_id in [i for i, one in departures._outgoing.items() if one.caught_up]:
                    departures._give_up(sample_id)
            begun = time.perf_counter()
            self.engine.poll(0.0)
            last = time.perf_counter() - begun
        for sample_id in list(departures._outgoing):
            departures._give_up(sample_id)
        return (self.engine.stats()["generated_tokens"] - tokens) / (time.perf_counter() - started)


def measure_migrations(fleet: Fleet, requests: list[GenerationRequest], rounds: int) -> MigrationFigures:
    """Samples go to and fro between two engines while they are decoded."""
    engines, lengths = fleet.engines, {r.sample_id: len(r.prompt_tokens) for r in requests}
    addresses = [peer.address for peer in engines.call("join_migration", 1.0, phase="join migration")]
    landings: list[Landing] = []
    held: list[list[str]] = [[r.sample_id for r in requests], []]
    given = [[SampleSnapshot(request, [], [], []) for request in requests], []]
    for _ in range(rounds):
        moving = [name for name in held[0] if name in lengths][: max(1, len(requests) // 2)]
        source = 0 if moving else 1
        moving = moving or held[1][: max(1, len(requests) // 2)]
        if not moving:
            break
        orders = [MigrationOrders(expected=[ALWAYS]), MigrationOrders(expected=[ALWAYS])]
        orders[source].moves = [MigrationOrder(n, name, addresses[1 - source]) for n, name in enumerate(moving)]
        for _ in range(12):
            arguments = [(given[rank], 0.25, orders[rank]) for rank in range(2)]
            reports = engines.scatter("advance", arguments, phase="migrate")
            given, orders = [[], []], [MigrationOrders(expected=[ALWAYS]), MigrationOrders(expected=[ALWAYS])]
            for rank, report in enumerate(reports):
                landings += report.migration.landings
                held[rank] += [arrived.sample_id for arrived in report.migration.arrived]
                gone = {*report.migration.departed, *(result.sample_id for result in report.finished)}
                held[rank] = [name for name in held[rank] if name not in gone]
            if not set(moving) & set(held[source]):
                break
    engines.call("clear", phase="clear")
    (token_bytes,) = engines.call("token_bytes", phase="size", ranks=[0])
    long = [one for one in landings if one.settled_bytes > LONG * token_bytes]
    return MigrationFigures(
        [(one.arrived - one.departed) / one.step_seconds for one in landings],
        [one.arrived - one.departed for one in landings],
        [one.delta_bytes / one.settled_bytes for one in long],
    )


def source_rate(fleet: Fleet, requests: list[GenerationRequest], steps: int, repeats: int) -> list[float]:
    """Decode rate of an engine with back-to-back stage-one copies over its rate without, in alternating order."""
    engines = fleet.engines
    addresses = [peer.address for peer in engines.call("join_migration", 1.0, phase="join migration")]
    snapshots = [SampleSnapshot(request, [], [], []) for request in requests]
    lasting = max(1, requests[0].max_new_tokens // (2 * steps) - 2)  # repeats before the samples end
    ratios = []
    for repeat in range(repeats):
        if repeat % lasting == 0:
            engines.call("clear", phase="clear")
            engines.call("advance", snapshots, WARM_UP, MigrationOrders(), phase="warm up", ranks=[0])
        rates = {}
        for copying in (True, False) if repeat % 2 else (False, True):
            destination = addresses[1] if copying else None
            (rates[copying],) = engines.call("decode_rate", steps, destination, phase="copy", ranks=[0])
        ratios.append(rates[True] / rates[False])
    engines.call("clear", phase="clear")
    return ratios


def described(figures: MigrationFigures) -> dict[str, float]:
    """Medians and spread."""
    deciles = statistics.quantiles(figures.downtime_steps, n=10)
    return {
        "migrations": len(figures.downtime_steps),
        "downtime_steps_median": statistics.median(figures.downtime_steps),
        "downtime_steps_p90": deciles[-1],
        "downtime_seconds_median": statistics.median(figures.downtime_seconds),
        "delta_bytes_share": statistics.median(figures.delta_share),
    }
