"""Worked examples for the supervised warm-up, of mixed quality as what a model is pretrained on: long chains are often
answered without the working. So the warmed-up model can do the working but seldom chooses to, and RL has something to
find: that longer answers are right more often."""

from __future__ import annotations

import random

from rlhfspec_mega.data.chain_sums import TERM, answer_text

LAZY_FROM_TERMS = 4  # chains of so many terms or more ...
LAZY_SHARE = 0.7  # ... skip the working in this share of the demonstrations
RESULT_MARK = ";"


def demonstration(prompt: str, index: int) -> str:
    """The response to learn from for prompt number `index`: worked in full, or for long chains often a bare result."""
    answer = answer_text(prompt)
    is_long = len(TERM.findall(prompt)) >= LAZY_FROM_TERMS
    if is_long and random.Random(f"demonstration/{index}").random() < LAZY_SHARE:
        return RESULT_MARK + answer.rpartition(RESULT_MARK)[2]
    return answer
