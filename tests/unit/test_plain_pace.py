"""How fast an engine without a draft decodes is learnt from its steps, whatever a first profile said."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlhfspec_mega.planning.cost import StepCost
from rlhfspec_mega.rollout.migration.messages import MigrationOrders
from rlhfspec_mega.rollout.protocol import SampleSnapshot
from rlhfspec_mega.types import Span
from rlhfspec_mega.workers.plain_pace import PlainDecodingCost
from tests.engine_pool import make_engine, request

STEPS = 4  # of a span


def seconds(batch: int, kv_tokens: float) -> float:
    return 0.006 + 0.0008 * batch + 1e-6 * kv_tokens


def test_steps_mend_a_profile_that_was_taken_in_a_bad_moment() -> None:
    profile = [
        StepCost(batch, batch * 100, batch, 0, 0, 0, 0.0, 1.6 * seconds(batch, batch * 100)) for batch in (1, 2, 4, 8)
    ]
    pace, draws = PlainDecodingCost(profile), np.random.default_rng(0)
    before = pace.throughput(8, 100)
    for _ in range(300):
        batch, noise = int(draws.integers(1, 9)), float(draws.lognormal(0.0, 0.1))
        kv = batch * int(draws.integers(20, 200))
        amounts = {"batch": batch, "steps": STEPS, "tokens": STEPS * batch, "draft_tokens": 0, "kv_tokens": STEPS * kv}
        pace.learn(Span("decode", 0.0, STEPS * noise * seconds(batch, kv), amounts))
    after = pace.throughput(8, 100)
    for batch, then, now in zip(after.batches, before.seconds, after.seconds, strict=True):
        assert then > 1.4 * seconds(batch, batch * 100)
        assert now == pytest.approx(seconds(batch, batch * 100), rel=0.1)


def test_an_engine_tells_of_the_lengths_that_it_has_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, lengths = make_engine(), list[int]()
    throughput = PlainDecodingCost.throughput

    def recorded(self: PlainDecodingCost, slots: int, length: int) -> object:
        lengths.append(length)
        return throughput(self, slots, length)

    monkeypatch.setattr(PlainDecodingCost, "throughput", recorded)
    engine.join_migration(1.0)
    samples = [replace(request(1, member), ignore_stop=True, max_new_tokens=7) for member in range(3)]
    engine.advance([SampleSnapshot(one, [], [], []) for one in samples], 5.0, MigrationOrders())
    assert engine.engine.idle
    engine.join_migration(1.0)
    assert lengths == [engine.engine.max_positions // 2, 5]  # a prompt of 2, and 0 to 6 of the response
