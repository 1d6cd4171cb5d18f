"""Reward of the built-in task: how many steps of the working are right, and whether all of it is."""

from __future__ import annotations

import re

from rlhfspec_mega.reward.score import RewardScore

STEP = re.compile(r"[+-]\d+=\d+")


def reward(prompt: str, response: str, answer: str, partial: float = 0.0) -> RewardScore:
    """1 for the worked solution `answer`, letter by letter; else `partial` times the share of correct leading steps."""
    if response == answer:
        return RewardScore(1.0, True)
    first, *expected = _steps(answer)
    given = _steps(response)
    correct = 0
    if given[0] == first:
        for step, reached in zip(expected, given[1:], strict=False):
            if step != reached:
                break
            correct += 1
    return RewardScore(partial * correct / len(expected), False)


def _steps(working: str) -> list[str]:
    """The first term and the steps that follow each other without a gap: "7+5=12-8=4 .." gives 7, +5=12, -8=4."""
    step = STEP.search(working)
    pieces = [working[: step.start()] if step else working]
    while step:
        pieces.append(step.group())
        step = STEP.match(working, step.end())
    return pieces
