"""Exact reward for word problems in GSM8K's form (Cobbe et al., 2021): the final number, after "####" if present."""

from __future__ import annotations

import re
from decimal import Decimal

from rlhfspec_mega.reward.score import RewardScore

NUMBER = re.compile(r"(?:(?<![\d.,)])-|(?<=\$)-)?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+")


def final_number(text: str) -> Decimal | None:
    """The first number after the last "####", else the last number of the text; None without any.

    "1,234" is one number, "$" is skipped, a full stop after the number does not belong to it, and a minus sign counts
    unless it stands between two numbers ("5-3" ends in 3).
    """
    marked = text.rpartition("####")
    numbers = NUMBER.findall(marked[2])
    if not numbers:
        return None
    return Decimal((numbers[0] if marked[1] else numbers[-1]).replace(",", "").replace("$", ""))


def reward(prompt: str, response: str, answer: str) -> RewardScore:
    """1 if the response ends in the answer's number, else 0. An answer without a number raises ValueError."""
    expected = final_number(answer)
    if expected is None:
        raise ValueError(f"the reference answer {answer!r} holds no number")
    exact = final_number(response) == expected
    return RewardScore(float(exact), exact)
