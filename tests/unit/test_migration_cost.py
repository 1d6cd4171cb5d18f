"""What the driver learns of the cost of migrations."""

from __future__ import annotations

import pytest

from rlhfspec_mega.planning.lengths import LengthPredictor
from rlhfspec_mega.planning.rollout_state import MigrationCost, Throughput
from rlhfspec_mega.rollout.migration.messages import PeerInfo
from rlhfspec_mega.rollout.migration.wire import Address
from rlhfspec_mega.rollout.reallocation import FIRST_DOWNTIME, Reallocation
from rlhfspec_mega.types import Landing
from tests.unit.test_migration import RandomMoves


def peer(name: str) -> PeerInfo:
    address = Address("localhost", 1, b"", name, "machine", 0)
    return PeerInfo(address, Throughput((1,), (1e-3,)), 4, 100, 1e-4, 1e-6)


def downtime_after(*measured: float, together: int = 1, rollouts: int = 1) -> float:
    """What a later rollout takes the downtime of a migration to be, after migrations that had these ones.

    Args:
        together: migrations that a report tells of.
        rollouts: that begin afterwards.
    """
    costs = list[MigrationCost]()
    reallocation = Reallocation(RandomMoves(0, 0.0), LengthPredictor(limit=16), 0.0, learn_cost=costs.append)
    reallocation.begin([], {0: peer("a"), 1: peer("b")})
    for first in range(0, len(measured), together):
        landings = [
            Landing(f"s{first + number}", "a", 10.0, 10.0 + seconds, 1, 1, 1e-3, begun=True)
            for number, seconds in enumerate(measured[first : first + together])
        ]
        reallocation.record(1, [], landings)
    for _ in range(rollouts):
        reallocation.begin([], {0: peer("a"), 1: peer("b")})
    return costs[-1].downtime


def test_one_slow_migration_does_not_end_them_all() -> None:
    """No later one could correct it, if it made the planner take all of them to be slow."""
    assert downtime_after(100.0) < 1.5 * FIRST_DOWNTIME
    assert downtime_after(*[100.0] * 8, together=8) < 3 * FIRST_DOWNTIME, "all of them waited for the same"


def test_without_migrations_they_are_taken_to_be_as_usual_again() -> None:
    assert downtime_after(*[1.0] * 60, rollouts=60) == pytest.approx(FIRST_DOWNTIME, rel=0.2)


def test_quick_ones_do_not_hide_slow_ones() -> None:
    assert downtime_after(*[-0.01] * 60, *[0.05] * 30) == pytest.approx(0.05, rel=0.1)


def test_slow_migrations_are_learnt_from_in_time() -> None:
    assert downtime_after(*[1.0] * 60) == pytest.approx(1.0, rel=0.05)
    assert downtime_after(*[0.002] * 60) == pytest.approx(0.002, rel=0.05)
