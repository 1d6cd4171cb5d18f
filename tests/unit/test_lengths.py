"""Predicted remaining lengths: against the truth of large samples, and how evidence moves them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfspec_mega.planning.lengths import PROMPTS_KEPT, LengthPredictor

LIMIT, GROUPS, MEMBERS = 4096, 200, 8
GROUP_OF = np.repeat(np.arange(GROUPS), MEMBERS)
PROMPTS = [f"prompt {group}" for group in range(GROUPS)]
NEW = [f"new {group}" for group in range(GROUPS)]


def lengths(
    rng: np.random.Generator, levels: np.ndarray, correlation: float = 0.6, median: float = 300.0
) -> np.ndarray:
    """Lognormal response lengths of all groups; members of a group share its level."""
    scores = math.sqrt(correlation) * levels[GROUP_OF] + math.sqrt(1.0 - correlation) * rng.normal(size=len(GROUP_OF))
    return np.clip(median * np.exp(0.8 * scores), 1, LIMIT).astype(np.int64)


def taught(rng: np.random.Generator, levels: np.ndarray, epochs: int = 3, **kwargs: float) -> LengthPredictor:
    predictor = LengthPredictor(LIMIT)
    for _ in range(epochs):
        predictor.begin(PROMPTS)
        tell(predictor, lengths(rng, levels, **kwargs), np.ones(len(GROUP_OF), np.bool_))
        predictor.end()
    return predictor


def tell(predictor: LengthPredictor, drawn: np.ndarray, ended: np.ndarray) -> None:
    for sample in np.flatnonzero(ended):
        predictor.finished(int(GROUP_OF[sample]), int(drawn[sample]))


@pytest.mark.parametrize("outlived", [0, 50, 150, 300, 600, 1200])
def test_without_other_evidence_it_is_the_mean_of_those_who_lived_as_long(outlived: int) -> None:
    """Independent lengths of unknown prompts: the empirical mean residual life is the reference."""
    rng = np.random.default_rng(0)
    predictor = taught(rng, np.zeros(GROUPS), correlation=0.0)
    many = np.concatenate([lengths(rng, np.zeros(GROUPS), correlation=0.0) for _ in range(100)])
    expected = float((many[many > outlived] - outlived).mean())
    predictor.begin(["unknown"])
    found = predictor.predict(np.zeros(1, np.int64), np.array([outlived]))
    assert found[0] == pytest.approx(expected, rel=0.15)


def test_unfinished_samples_are_lower_bounds() -> None:
    """In a first rollout, when the shorter half has ended, the mean of what ended says much too little."""
    rng = np.random.default_rng(1)
    drawn = lengths(rng, rng.normal(size=GROUPS))
    predictor = LengthPredictor(LIMIT)
    predictor.begin(PROMPTS)
    ended = drawn <= 300
    tell(predictor, drawn, ended)
    found = predictor.predict(GROUP_OF[~ended], np.full((~ended).sum(), 300))
    truth = (drawn[~ended] - 300).mean()
    assert drawn[ended].mean() < 300
    assert 0.6 * truth < found.mean() < 1.7 * truth


def test_finished_members_of_a_group_tell_of_the_others() -> None:
    """Half of each group has ended, and the prompts are new: groups of long answers are predicted longer."""
    rng = np.random.default_rng(2)
    predictor = taught(rng, rng.normal(size=GROUPS))
    drawn = lengths(rng, rng.normal(size=GROUPS))
    ended = np.tile(np.arange(MEMBERS) < MEMBERS // 2, GROUPS)
    predictor.begin(NEW)
    nothing = np.zeros((~ended).sum(), np.int64)
    before = np.abs(predictor.predict(GROUP_OF[~ended], nothing) - drawn[~ended]).mean()
    tell(predictor, drawn, ended)
    found = predictor.predict(GROUP_OF[~ended], nothing)
    assert np.corrcoef(found, drawn[~ended])[0, 1] > 0.5
    assert np.abs(found - drawn[~ended]).mean() < 0.85 * before


def test_a_prompt_s_earlier_epochs_tell_of_the_next() -> None:
    rng = np.random.default_rng(3)
    levels = rng.normal(size=GROUPS)
    predictor = taught(rng, levels)
    drawn, nothing = lengths(rng, levels), np.zeros(len(GROUP_OF), np.int64)
    errors = {}
    for prompts in (tuple(PROMPTS), tuple(NEW)):
        predictor.begin(prompts)
        errors[prompts] = np.abs(predictor.predict(GROUP_OF, nothing) - drawn).mean()
    known, unknown = errors.values()
    assert known < 0.8 * unknown


def test_weak_evidence_moves_a_prediction_less_than_strong() -> None:
    rng = np.random.default_rng(4)
    predictor = taught(rng, rng.normal(size=GROUPS))
    found = []
    for ended in range(5):
        predictor.begin(["new"])
        for _ in range(ended):
            predictor.finished(0, 2000)
        found.append(float(predictor.predict(np.zeros(1, np.int64), np.zeros(1, np.int64))[0]))
    assert found == sorted(found)
    steps = np.diff(found)
    assert steps[0] > steps[1] > steps[2] > steps[3] > 0
    assert found[-1] < 2500


def test_a_sample_that_outlives_its_peers_is_predicted_longer() -> None:
    rng = np.random.default_rng(5)
    predictor = taught(rng, rng.normal(size=GROUPS))
    predictor.begin(["new"])
    for length in (90, 100, 110):
        predictor.finished(0, length)
    generated = np.array([0, 50, 100, 200, 400, 800, 1600, 3200])
    totals = [float(g + predictor.predict(np.zeros(1, np.int64), np.array([g]))[0]) for g in generated]
    assert totals == sorted(totals)
    assert totals[0] < 250 and totals[-1] > 3200


def test_correlation_of_groups_is_learnt() -> None:
    """With independent lengths a group's finished members must hardly count, with correlated ones much."""
    shifts = []
    for correlation in (0.0, 0.8):
        rng = np.random.default_rng(6)
        predictor = taught(rng, rng.normal(size=GROUPS), epochs=12, correlation=correlation)
        found = []
        for told in (0, 1500):
            predictor.begin(["new"])
            for _ in range(4 if told else 0):
                predictor.finished(0, told)
            found.append(float(predictor.predict(np.zeros(1, np.int64), np.zeros(1, np.int64))[0]))
        shifts.append(found[1] / found[0])
    assert shifts[0] < 1.3
    assert shifts[1] > 2.0


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 20000))
def test_predictions_are_bounded_whatever_happened(seed: int, limit: int) -> None:
    rng = np.random.default_rng(seed)
    predictor = LengthPredictor(limit)
    for _ in range(2):
        groups = int(rng.integers(1, 5))
        predictor.begin([str(rng.integers(0, 3)) for _ in range(groups)])
        for _ in range(int(rng.integers(0, 30))):
            predictor.finished(int(rng.integers(0, groups)), int(rng.integers(1, limit + 1)))
        count = int(rng.integers(0, 20))
        generated = rng.integers(0, limit, count)
        found = predictor.predict(rng.integers(0, groups, count), generated)
        assert found.shape == (count,)
        assert (found >= 1.0).all() and (found <= np.maximum(limit - generated, 1)).all()
        predictor.end()


def test_state_survives_json_and_goes_on_alike() -> None:
    rng = np.random.default_rng(7)
    levels = rng.normal(size=GROUPS)
    predictor = taught(rng, levels)
    again = LengthPredictor(LIMIT)
    again.load_state_dict(json.loads(json.dumps(predictor.state_dict())))
    drawn = lengths(rng, levels)
    for each in (predictor, again):
        each.begin(PROMPTS)
        tell(each, drawn, drawn < 200)
    generated = np.full(len(GROUP_OF), 200)
    assert np.array_equal(predictor.predict(GROUP_OF, generated), again.predict(GROUP_OF, generated))


def test_under_another_limit_long_prompts_are_still_known() -> None:
    rng = np.random.default_rng(8)
    levels = rng.normal(size=GROUPS)
    other = LengthPredictor(2 * LIMIT)
    other.load_state_dict(taught(rng, levels).state_dict())
    other.begin(PROMPTS)
    found = other.predict(np.arange(GROUPS), np.zeros(GROUPS, np.int64))
    assert np.corrcoef(np.log(found), levels)[0, 1] > 0.8


def test_history_is_bounded_and_the_oldest_prompts_leave() -> None:
    predictor = LengthPredictor(LIMIT)
    for first in range(0, PROMPTS_KEPT + 4096, 4096):
        prompts = [str(first + i) for i in range(4096)]
        predictor.begin(prompts)
        for group in range(4096):
            predictor.finished(group, 10 + group % 7)
        predictor.end()
    history = predictor.state_dict()["history"]
    assert len(history) == PROMPTS_KEPT
    assert "0" not in history and str(PROMPTS_KEPT + 4095) in history
