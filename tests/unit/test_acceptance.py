"""Calibration against synthetic drafts whose acceptance probabilities are known."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rlhfspec_mega.planning.acceptance import CELLS, GAPS, RANKS, TEMPERATURE_EDGES, AcceptanceModel
from rlhfspec_mega.planning.calibration import Calibration, add_outcomes
from rlhfspec_mega.planning.cost import CostModel
from rlhfspec_mega.planning.strategy import Fixed
from rlhfspec_mega.planning.tree import ROOT, Batch, DraftTree, StepRecord
from tests.synthetic_drafts import Truth, decode_step, logistic, make_batch

WIDTH, DEPTH = 3, 5


def train(model: AcceptanceModel, truth: Truth, steps: int, rng: np.random.Generator, temperature: float = 1.0) -> None:
    policy = Fixed(model, CostModel(frozen=True), WIDTH, DEPTH, 40)
    for _ in range(steps):
        decode_step(policy, make_batch(4, rng, temperature), truth, rng)


def deviations(model: AcceptanceModel, truth: Truth, rng: np.random.Generator) -> np.ndarray:
    """Predicted minus true conditional probability over nodes of fresh trees."""
    policy = Fixed(AcceptanceModel(), CostModel(frozen=True), WIDTH, DEPTH, 40)
    found = []
    for _ in range(30):
        record = decode_step(policy, make_batch(4, rng), truth, rng)
        tree, batch = record.tree, record.batch
        predicted = model.conditional(batch, tree, slice(0, tree.size))
        for node in range(tree.size):
            chances = truth(tree.gaps[node], int(tree.depths[node]), int(batch.lengths[tree.rows[node]]), WIDTH)
            found.append(predicted[node] - chances[tree.ranks[node]])
    return np.array(found)


def expected_layer(model: AcceptanceModel, depth: int, temperature: float) -> np.ndarray:
    return model.expected_layers()[TEMPERATURE_EDGES.searchsorted(temperature), depth - 1]


def test_it_converges_to_the_true_probabilities_and_is_calibrated() -> None:
    rng = np.random.default_rng(0)
    model, truth = AcceptanceModel(), logistic()
    train(model, truth, 300, rng)
    off = deviations(model, truth, rng)
    assert abs(off.mean()) < 0.02 and np.sqrt((off**2).mean()) < 0.05
    report = model.report()
    assert report.observations > 5000 and report.calibration_error < 0.03
    assert not model._sums.any(), "the buffer of each step is as it was"
    assert report.predicted == pytest.approx(report.realised, rel=0.05)
    assert report.recent_predicted == pytest.approx(report.recent_realised, rel=0.08)


def test_it_follows_a_change_of_the_draft() -> None:
    rng = np.random.default_rng(1)
    model, worse = AcceptanceModel(), logistic(shift=-1.2)
    train(model, logistic(), 250, rng)
    before = np.abs(deviations(model, worse, rng).mean())
    train(model, worse, 250, rng)
    off = deviations(model, worse, rng)
    assert before > 0.05 and abs(off.mean()) < 0.02 and np.sqrt((off**2).mean()) < 0.08


def test_position_and_depth_are_told_apart_from_rank_and_gap() -> None:
    """Best children fail more often the longer the sample and the deeper the node; the rest win by it."""
    rng = np.random.default_rng(2)
    model = AcceptanceModel()
    train(model, logistic(per_depth=-0.4, per_doubling=-0.4), 300, rng)
    tree = DraftTree()
    tree.add_layer(np.array([0, 0, 1, 1]), np.full(4, ROOT), np.array([0, 1, 0, 1]), np.ones(4), np.zeros(4, bool))
    batch = Batch(np.array([70, 1400]), np.array([50, 1380]), np.full(2, 99), np.ones(2), 2, np.arange(900, 902))
    short, short_second, long, long_second = model.conditional(batch, tree, slice(0, 4))
    assert short > long + 0.15 and long_second > short_second + 0.01
    assert expected_layer(model, 1, 1.0)[0] > expected_layer(model, 5, 1.0)[0] + 0.1


def test_a_layer_not_drafted_yet_is_expected_as_the_drafted_ones_were() -> None:
    rng = np.random.default_rng(3)
    model, truth = AcceptanceModel(), logistic(per_doubling=0.0)
    train(model, truth, 400, rng)
    gaps = rng.exponential(1.2, 4000)
    for depth in (1, 3):
        actual = np.mean([truth(gap, depth, 100, WIDTH) for gap in gaps], axis=0)
        # Survivors of earlier layers have larger gaps, so the deeper layer's average is of other parents: 5%.
        assert expected_layer(model, depth, 1.0)[:WIDTH] == pytest.approx(actual, abs=0.05)


def test_temperature_classes_do_not_mix() -> None:
    rng = np.random.default_rng(4)
    model = AcceptanceModel()
    prior = expected_layer(model, 1, 0.0).copy()
    train(model, logistic(shift=-2.0), 100, rng, temperature=1.0)
    learnt, other = expected_layer(model, 1, 1.0), expected_layer(model, 1, 0.0)
    # Depth and position are shared; rank and gap are not.
    assert prior[0] - learnt[0] > 1.3 * (prior[0] - other[0]) > 0


def test_only_children_of_accepted_nodes_teach() -> None:
    model = AcceptanceModel()
    batch = Batch(np.array([100]), np.array([50]), np.array([99]), np.ones(1), 1, np.array([0]))
    tree = DraftTree()
    tree.add_layer(np.array([0]), np.array([ROOT]), np.array([0]), np.ones(1), np.zeros(1, bool))
    tree.add_layer(np.array([0]), np.array([0]), np.array([0]), np.ones(1), np.zeros(1, bool))
    tree.survival[:] = 0.5, 0.25
    before = expected_layer(model, 2, 1.0)[0]
    model.observe(StepRecord(batch, tree, np.array([0, 1]), np.array([False, False]), 1, 0.0, 0.0))
    assert model.report().observations == 1
    assert model.report().predicted == pytest.approx(0.75) and model.report().realised == 0.0
    assert expected_layer(model, 2, 1.0)[0] < before  # through the cell, which depth 1 shares


def test_probabilities_stay_off_certainty_and_the_prior_is_sensible() -> None:
    model = AcceptanceModel()
    rng = np.random.default_rng(5)
    layer = expected_layer(model, 1, 1.0)
    assert 0.6 < layer[0] < 0.9 and (np.diff(layer) < 0).all() and layer.sum() < 1.0
    train(model, lambda gap, depth, length, width: np.eye(1, width)[0], 200, rng)
    assert 0.97 < expected_layer(model, 1, 1.0)[0] <= 0.999
    assert 0.001 <= expected_layer(model, 1, 1.0)[1] < 0.03


def test_calibration_error_by_hand() -> None:
    calibration = Calibration()
    # Two bins: 0.25 predicted, half accepted (off by 0.25); 0.95 predicted, all accepted (off by 0.05).
    add_outcomes(calibration.sums, np.array([0.25, 0.25, 0.95, 0.95]), np.array([True, False, True, True]), 2.5)
    add_outcomes(calibration.sums, np.array([]), np.array([], bool), 0.5)
    report = calibration.report()
    assert report.calibration_error == pytest.approx(0.15)
    assert (report.predicted, report.realised) == (1.5, 1.5)
    assert report.recent_predicted == pytest.approx((0.99 * 2.5 + 0.5) / 1.99)
    assert Calibration().report().realised == 0.0


def test_state_goes_through_json() -> None:
    first, second = AcceptanceModel(), AcceptanceModel()
    train(first, logistic(), 20, np.random.default_rng(6))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for model in (first, second):
        train(model, logistic(), 5, np.random.default_rng(7))
    assert first.state_dict() == second.state_dict() and first.report() == second.report()


def test_a_samples_own_past_counts_for_it_alone() -> None:
    rng, model = np.random.default_rng(6), AcceptanceModel()
    policy = Fixed(model, CostModel(frozen=True), WIDTH, DEPTH, 40)
    train(model, logistic(), 200, rng)
    lengths, lucky, hard = np.array([200, 500]), logistic(shift=1.8), logistic(shift=-1.2)

    def two(first: int) -> Batch:
        return Batch(lengths, lengths - 20, np.full(2, 1000), np.ones(2), 4, np.arange(first, first + 2))

    for _ in range(40):  # lengths tell the two apart for the truth, and should not have to for the model
        batch = two(7)
        decode_step(policy, batch, lambda gap, d, n, w: (lucky if n == 200 else hard)(gap, d, n, w), rng)
    tree = DraftTree()
    tree.add_layer(np.array([0, 1]), np.full(2, ROOT), np.zeros(2, int), np.ones(2), np.zeros(2, bool))
    own = model.conditional(two(7), tree, slice(0, 2))
    others = model.conditional(two(100), tree, slice(0, 2))
    assert own[0] - own[1] > others[0] - others[1] + 0.15
    again = model.conditional(two(7 + 1024), tree, slice(0, 2))  # the same places in the tables, other samples
    np.testing.assert_array_equal(again, others)


def test_what_was_never_wrong_is_soon_believed_to_fail() -> None:
    """Millions of outcomes had moved the log-odds of the best children to 45."""
    rng, model = np.random.default_rng(8), AcceptanceModel()
    state = model.state_dict()
    best = [cell for cell in range(CELLS) if cell % (RANKS * GAPS) < GAPS]
    state["odds"] = [45.0 if entry in best else odds for entry, odds in enumerate(state["odds"])]
    model.load_state_dict(state)
    assert expected_layer(model, 1, 1.0)[0] > 0.99
    train(model, lambda gap, depth, length, width: np.zeros(width), 100, rng)
    assert expected_layer(model, 1, 1.0)[0] < 0.5


def test_calibration_error_is_of_late() -> None:
    calibration = Calibration()
    for _ in range(5000):
        add_outcomes(calibration.sums, np.array([0.55]), np.array([False]), 0.55)
    assert calibration.report().calibration_error == pytest.approx(0.55)
    for step in range(5000):
        add_outcomes(calibration.sums, np.array([0.5]), np.array([step % 2 == 0]), 0.5)
    assert calibration.report().calibration_error < 0.02 and calibration.report().observations == 10_000
