"""What scoring a sample gives: a reward, or the reason why there is none."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class RewardScore(NamedTuple):
    """A reward function's result.

    `value` (finite) is used for training, `exact` is whether the response counts as correct.
    """

    value: float
    exact: bool


class FailureKind(StrEnum):
    """Why a sample has no reward."""

    EXCEPTION = "exception"  # the function raised
    BAD_VALUE = "bad_value"  # it returned no finite number
    TIMEOUT = "timeout"
    CRASH = "crash"  # the function ended its process
    REFUSED = "refused"  # the remote service did not score it


class RewardFailure(NamedTuple):
    """A sample without a reward.

    Attributes:
        message: what went wrong, a fragment of a sentence whose subject is the function or the service.
        trace: the Python traceback of an exception; "" for other kinds.
    """

    kind: FailureKind
    message: str
    trace: str = ""
