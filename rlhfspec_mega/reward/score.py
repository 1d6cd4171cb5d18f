"""What a reward function returns."""

from __future__ import annotations

from typing import NamedTuple


class RewardScore(NamedTuple):
    """A reward function's result.

    `value` (finite) is used for training, `exact` is whether the response counts as correct.
    """

    value: float
    exact: bool
