"""What a draft could gain at most, against a walk from token to token."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from benchmarks.ceilings import SHARES, ceiling
from benchmarks.generation_peers import Rules
from benchmarks.scenarios import Scenario
from benchmarks.tokens_per_step import DEPTHS, KEPT, SHARED
from rlhfspec_mega.planning.cost import CostModel

TOKENS, PROMPT = 60.0, 20
LAYER = {4: 0.66, 8: 0.7}  # acceptance in trees of so many layers: each is the best somewhere


def rate(depth: int, kept: int) -> float:
    """Tokens per step: those of a chain, and a little for what is beside it."""
    layers = min(depth, kept)
    chain = sum(LAYER[depth] ** layer for layer in range(layers + 1))
    return float(chain + 0.5 * (kept - layers) ** 0.5) if depth == 4 else chain


RULES = Rules(
    torch.tensor([TOKENS]),
    {(SHARED, d, k): torch.tensor([TOKENS / rate(d, k)], dtype=torch.float64) for d in DEPTHS for k in KEPT},
)


class Costs:
    """Milliseconds in which every part of a step counts: samples, KV, draft tokens, layers, what the draft reads."""

    def plain_seconds(self, batch: int, kv: int) -> float:
        return 3.0 + 0.1 * batch + 0.002 * kv

    def verify_seconds(self, batch: int, kv: int, tokens: int) -> float:
        return self.plain_seconds(batch, kv) + 0.1 * (tokens - batch)

    def draft_seconds(self, batch: int, kv: int, backlog: int, depth: int, drafted: int) -> float:
        return 0.2 * depth + 0.02 * backlog + 0.02 * drafted + 0.0001 * kv * depth


def seconds_per_token(batch: int, kv: int, share: float) -> float:
    """The quickest of all trees, or a plain step."""
    cost = Costs()
    found = [cost.plain_seconds(batch, kv)]
    for depth in DEPTHS:
        for kept in KEPT:
            layers, gives = min(depth, kept), rate(depth, kept)
            drafting = cost.draft_seconds(batch, kv, round(batch * gives), layers, batch * (layers - 1))
            found.append((share * drafting + cost.verify_seconds(batch, kv, batch * (1 + kept))) / gives)
    return min(found)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("lengths", [(90,), (70, 70, 70), (30, 91, 55, 55), (20, 400, *[110] * 30)])
def test_it_is_that_of_the_quickest_step_at_each_token(lengths: tuple[int, ...], share: float) -> None:
    plain = quickest = 0.0
    for token in range(max(lengths)):
        batch = sum(length > token for length in lengths)
        kv = batch * (PROMPT + token)
        plain += Costs().plain_seconds(batch, kv)
        quickest += seconds_per_token(batch, kv, share)
    found = ceiling(cast(CostModel, Costs()), RULES, Scenario("", lengths), PROMPT, share)
    # Between two ends of samples the KV of the middle stands for that of all tokens.
    assert found == pytest.approx(plain / quickest, rel=5e-3)


def test_a_cheaper_draft_allows_more() -> None:
    cost = cast(CostModel, Costs())
    found = [ceiling(cost, RULES, Scenario("", (9,)), PROMPT, share) for share in SHARES]
    assert 1.0 < found[0] < found[1] < found[2]
