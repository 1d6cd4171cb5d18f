"""Reward of the built-in task: how far the working is right, and whether all of it is."""

from __future__ import annotations

import re

from rlhfspec_mega.reward.score import RewardScore

STEP = re.compile(r"[+-]\d+=\d+")


def reward(prompt: str, response: str, answer: str, partial: float = 0.5) -> RewardScore:
    """1 for the worked solution `answer`, letter by letter; else `partial` times the share of correct leading steps."""
    if response == answer:
        return RewardScore(1.0, True)
    expected = STEP.findall(answer)
    correct = 0
    position = 0
    for step in expected:
        match = STEP.match(response, position)
        if match is None or match.group() != step:
            break
        correct += 1
        position = match.end()
    return RewardScore(partial * correct / len(expected), False)
