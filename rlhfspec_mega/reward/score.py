"""What a reward function returns."""

from __future__ import annotations

from typing import NamedTuple


class RewardScore(NamedTuple):
    """`value` is what the policy is trained on (finite); `exact` says whether the response counts as correct."""

    value: float
    exact: bool
