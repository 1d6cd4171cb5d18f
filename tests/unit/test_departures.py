"""Samples on their way out of an engine that decodes all the time, as SGLang does in its own processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhfspec_mega.rollout.migration import departures
from rlhfspec_mega.rollout.migration.messages import MigrationOrders
from rlhfspec_mega.rollout.protocol import SampleSnapshot
from rlhfspec_mega.rollout.torch_engine.engine import TorchEngine
from rlhfspec_mega.types import GenerationResult
from tests.engine_pool import request
from tests.unit.test_migration import advance, alone, begin, order


def test_a_sample_that_ends_while_another_is_handed_over_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was copied in part, and the other, which came later and is shorter, to its end."""
    first, second, (long,) = begin(1)
    monkeypatch.setattr(departures, "COPY_SHARE", 0.0)
    monkeypatch.setattr(TorchEngine, "min_copy_bytes", 2 * first.engine.kv_layout(1).bytes + 1)  # two rows, and a third
    for _ in range(7):
        first.advance([], 0.0, MigrationOrders())
    short = replace(long, sample_id="4.0", group_id="4", prompt_tokens=(1,))
    first.advance([SampleSnapshot(short, [], [], [])], 0.0, MigrationOrders())
    export, ended = first.engine.export_sample, list[GenerationResult]()

    def slowly(sample_id: str, with_kv: bool = True) -> SampleSnapshot:
        snapshot = export(sample_id, with_kv)
        while first.engine.has_sample(long.sample_id):
            ended.extend(first.engine.poll(0.0))
        return snapshot

    monkeypatch.setattr(first.engine, "export_sample", slowly)
    reports = advance(first, lambda report: report.migration.kept, order(second, long, short))
    assert reports[-1].migration.kept == [long.sample_id] and not any(report.finished for report in reports)
    assert [result.tokens for result in ended] == [alone([long])[long.sample_id].tokens]
    assert not first.engine.has_sample(short.sample_id)


def test_the_end_of_a_rollout_frees_every_copy_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it turns out only then that the destination is gone: a descriptor may be another file's by now."""
    first, second, _ = begin(0)
    one = replace(request(4, 0), prompt_tokens=tuple(range(1, 7)), ignore_stop=True, max_new_tokens=9)
    moving = [replace(one, sample_id=f"{group}.{i}", group_id=group) for i, group in enumerate("445")]
    first.advance([SampleSnapshot(one, [], [], []) for one in moving], 0.0, MigrationOrders())
    monkeypatch.setattr(departures, "COPY_SHARE", 0.0)
    monkeypatch.setattr(TorchEngine, "min_copy_bytes", 1)  # copies last
    first.advance([], 0.0, order(second, *moving))
    assert first.migration and len(first.migration._departures._outgoing) == 3
    closed, close = list[int](), departures.Staging.close

    def noted(self: departures.Staging) -> None:
        closed.append(id(self))
        close(self)

    def broken(*_: object) -> None:
        raise ConnectionError("gone")

    monkeypatch.setattr(departures.Staging, "close", noted)
    monkeypatch.setattr(departures.Outbox, "send", broken)
    first.clear()
    assert len(closed) == len(set(closed)) == 3 + 2, "of three samples and two prompts"
