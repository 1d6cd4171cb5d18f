"""Control steps, the watch for a collapse, and the counts of an overseen policy."""

from __future__ import annotations

import numpy as np
import pytest

from rlhfspec_mega.observe.drafting import BY_VERIFIED, collapse_notes, drafting_figures, drafting_metrics
from rlhfspec_mega.planning.control import EVERY
from rlhfspec_mega.planning.oversight import OverseenPolicy
from rlhfspec_mega.planning.tree import ROOT, Batch, DraftTree, StepRecord
from rlhfspec_mega.planning.watch import LEAST, PROBE_EVERY, CollapseWatch
from rlhfspec_mega.types import TALLY_EDGES, DraftingTally
from tests.random_trees import RandomTrees

SIZE = 10


def batch() -> Batch:
    many = np.full(SIZE, 50)
    return Batch(many, many, many, np.ones(SIZE), backlog=SIZE)


def step(accepted: int, seconds: float = 1.0, drafted: bool = True) -> StepRecord:
    """Each sample verifies its best first token, or none; the first `accepted` of them are accepted."""
    tree, rows = DraftTree(), np.arange(SIZE)
    zeros = np.zeros(SIZE, np.int64)
    if drafted:
        tree.add_layer(rows, np.full(SIZE, ROOT), zeros, np.ones(SIZE), zeros.astype(bool))
    chosen = np.arange(tree.size)
    return StepRecord(batch(), tree, chosen, chosen < accepted, 0, 0.0, seconds)


def feed(watch: CollapseWatch, accepted: int) -> None:
    for _ in range(LEAST // SIZE):
        watch.observe(step(accepted))


def test_a_collapse_stops_drafting_until_the_probes_recover() -> None:
    watch = CollapseWatch(ratio=0.5)
    feed(watch, 8)
    feed(watch, 5)
    assert not watch.collapsed and watch.usual is not None and 0.7 < watch.usual < 0.8
    watch.weights_changed()
    feed(watch, 3)
    assert watch.collapsed and watch.rate == pytest.approx(0.3)
    assert sum(watch.may_draft() for _ in range(10 * PROBE_EVERY)) == 10
    feed(watch, 3)
    assert watch.collapsed, "what is bad must not become usual"
    feed(watch, 7)
    assert not watch.collapsed and all(watch.may_draft() for _ in range(100))


def test_an_update_begins_a_new_window() -> None:
    watch = CollapseWatch(ratio=0.5)
    feed(watch, 8)
    for _ in range(LEAST // SIZE - 1):
        watch.observe(step(0))
    watch.weights_changed()
    feed(watch, 8)
    assert not watch.collapsed


def test_control_steps_measure_what_speculation_gains() -> None:
    policy = OverseenPolicy(RandomTrees(0), collapse_ratio=0.5)
    policy.policy.depth = lambda batch: 1  # type: ignore[method-assign]
    plain = 0
    for _ in range(10 * EVERY):
        drafted = policy.depth(batch()) > 0
        plain += not drafted
        # 15 tokens in 2 seconds against 10 in 1.6: 0.133 against 0.16 seconds a token.
        policy.observe(step(5, 2.0) if drafted else step(0, 1.6, drafted=False))
    tally = policy.take_tally()
    assert plain == 10 and tally.paired_seconds == pytest.approx(20.0)
    assert tally.paired_plain_seconds / tally.paired_seconds == pytest.approx(15 * 0.16 / 2.0)
    assert policy.take_tally() == DraftingTally(usual_rate=tally.usual_rate)


def test_counts_and_figures() -> None:
    policy = OverseenPolicy(RandomTrees(0), collapse_ratio=0.5)
    for accepted in (4, 6):
        policy.observe(step(accepted))
    policy.observe(step(0, drafted=False))
    metrics = drafting_metrics([policy.take_tally(), DraftingTally()])
    assert metrics["tokens_per_step"] == pytest.approx(1 + 10 / 30)
    assert metrics["accepted_length"] == pytest.approx(10 / 20)
    assert metrics["verified_per_accepted"] == pytest.approx(2.0)
    figures = drafting_figures([metrics, metrics])
    assert figures["share_by_verified"]["0"] == pytest.approx(1 / 3)
    assert figures["share_by_verified"]["1"] == pytest.approx(2 / 3)
    assert sum(figures["share_by_verified"].values()) == pytest.approx(1.0)
    assert "speedup_vs_plain" not in figures and drafting_metrics([]) == {} and drafting_figures([{}]) == {}


def test_every_class_has_a_name() -> None:
    assert len(BY_VERIFIED) == len(TALLY_EDGES) + 1 and BY_VERIFIED[3] == "3-4" and BY_VERIFIED[-1] == "over 16"


def test_a_collapse_is_said() -> None:
    assert collapse_notes([DraftingTally(usual_rate=0.8)]) == []
    (note,) = collapse_notes([DraftingTally(collapsed_rate=0.25, usual_rate=0.8)])
    assert "25%" in note and "80%" in note and "samples are not affected" in note
