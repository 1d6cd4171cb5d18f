"""Shaping of rewards, against plain references, and advantages of groups in which some samples have no reward."""

from __future__ import annotations

import json
from statistics import mean, stdev

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhfspec_mega.config.schema.reward import RewardConfig
from rlhfspec_mega.rl.advantages import degenerate, grpo, rloo
from rlhfspec_mega.rl.shaping import RewardShaping

MEMBERS = 3
REWARDS = st.one_of(st.just(float("nan")), st.floats(-10, 10).map(lambda value: round(value, 3)))
GROUPS = st.lists(st.lists(REWARDS, min_size=MEMBERS, max_size=MEMBERS), min_size=1, max_size=5)


def shaped(config: RewardConfig, groups: list[list[float]], lengths: list[int] | None = None) -> list[float]:
    flat = np.array(groups, np.float64).flatten()
    return RewardShaping(config, MEMBERS, 10).shape(flat, np.array(lengths or [1] * len(flat))).tolist()


def normalized(values: list[float]) -> list[float]:
    there = [value for value in values if value == value]
    if len(there) < 2:
        return [value * 0.0 for value in values]
    return [(value - mean(there)) / max(stdev(there), 1e-6) for value in values]


@given(GROUPS)
def test_normalization_leaves_out_samples_without_a_reward(groups: list[list[float]]) -> None:
    flat = [value for group in groups for value in group]
    expected = {
        "none": flat,
        "batch": normalized(flat),
        "group": [value for group in groups for value in normalized(group)],
    }
    for kind, values in expected.items():
        assert shaped(RewardConfig(normalize=kind), groups) == pytest.approx(values, nan_ok=True, rel=1e-6, abs=1e-6)


@given(st.lists(GROUPS, min_size=1, max_size=4))
def test_running_normalization_is_that_of_all_rewards_so_far_and_survives_a_checkpoint(
    steps: list[list[list[float]]],
) -> None:
    config, before = RewardConfig(normalize="running"), list[float]()
    shaping = RewardShaping(config, MEMBERS, 10)
    for groups in steps:
        flat = [value for group in groups for value in group]
        before += [value for value in flat if value == value]
        shaping = restored(shaping, config)
        found = shaping.shape(np.array(flat), np.ones(len(flat), np.int64)).tolist()
        deviation = stdev(before) if len(before) > 1 else 0.0
        middle = mean(before) if before else 0.0
        expected = [(value - middle) / max(deviation, 1e-6) for value in flat]
        if deviation > 1e-4 or deviation == 0.0 == max(map(abs, before), default=0.0):
            assert found == pytest.approx(expected, nan_ok=True, rel=1e-6, abs=1e-6)


def restored(shaping: RewardShaping, config: RewardConfig) -> RewardShaping:
    again = RewardShaping(config, MEMBERS, 10)
    again.load_state_dict(json.loads(json.dumps(shaping.state_dict())))
    return again


def test_rewards_are_clipped_and_long_responses_are_penalized() -> None:
    config = RewardConfig(clip=2.0, length_penalty=0.8, length_free=6)
    found = shaped(config, [[5.0, -5.0, 1.0]], [6, 8, 10])
    assert found == pytest.approx([2.0, -2.0 - 0.4, 1.0 - 0.8])


@given(GROUPS)
def test_advantages_are_those_of_the_members_with_a_reward(groups: list[list[float]]) -> None:
    rewards = torch.tensor(groups, dtype=torch.float64)
    found = {"mean": grpo(rewards, False), "deviation": grpo(rewards, True), "others": rloo(rewards)}
    for number, group in enumerate(groups):
        there = [value for value in group if value == value]
        equal = not there or max(there) - min(there) < 1e-6
        assert bool(degenerate(rewards)[number]) == equal
        for member, value in enumerate(group):
            others = [other for place, other in enumerate(group) if place != member and other == other]
            none = equal or value != value
            expected = {
                "mean": 0.0 if none else value - mean(there),
                "deviation": 0.0 if none else (value - mean(there)) / stdev(there),
                "others": 0.0 if none else value - mean(others),
            }
            for name, advantage in expected.items():
                assert float(found[name][number, member]) == pytest.approx(advantage, abs=1e-9), name
