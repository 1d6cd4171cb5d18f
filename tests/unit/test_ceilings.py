"""What a draft could gain at most, against a walk from token to token."""

from __future__ import annotations

import pytest
import torch

from benchmarks.ceilings import SHARES, ceiling
from benchmarks.generation_peers import Rules
from benchmarks.scenarios import Scenario
from benchmarks.tokens_per_step import DEPTHS, KEPT, SHARED
from rlhfspec_mega.planning.cost import CostModel

ACCEPTED, TOKENS = 0.7, 60.0
COST = CostModel.nominal(14_000_000, 2_000_000)  # without a part for KV, so that prompts do not matter


def chains() -> Rules:
    """Of a draft whose tokens are each accepted with the same probability, and of which only chains are kept."""
    rates = {(SHARED, depth, kept): rate(min(depth, kept)) for depth in DEPTHS for kept in KEPT}
    steps = {setting: torch.tensor([TOKENS / each]) for setting, each in rates.items()}
    return Rules(torch.tensor([TOKENS]), steps)


def rate(layers: int) -> float:
    return sum(ACCEPTED**layer for layer in range(layers + 1))


def seconds_per_token(batch: int, share: float) -> float:
    """The quickest of all chains, or a plain step."""
    found = [COST.plain_seconds(batch, 0)]
    for depth in DEPTHS:
        for kept in KEPT:
            layers = min(depth, kept)
            drafting = COST.draft_seconds_scalar(batch, 0, round(batch * rate(layers)), layers, batch * (layers - 1))
            found.append((share * drafting + float(COST.verify_seconds(batch, 0, batch * (1 + kept)))) / rate(layers))
    return min(found)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("lengths", [(9,), (7, 7, 7), (3, 9, 5, 5), (2, 40, *[11] * 30)])
def test_it_is_that_of_the_quickest_step_at_each_token(lengths: tuple[int, ...], share: float) -> None:
    batches = [sum(length > token for length in lengths) for token in range(max(lengths))]
    plain = sum(COST.plain_seconds(batch, 0) for batch in batches)
    quickest = sum(seconds_per_token(batch, share) for batch in batches)
    found = ceiling(COST, chains(), Scenario("", lengths), 20, share)
    assert found == pytest.approx(plain / quickest)
    assert found >= 1.0


def test_a_cheaper_draft_allows_more() -> None:
    found = [ceiling(COST, chains(), Scenario("", (9,)), 20, share) for share in SHARES]
    assert 1.0 < found[0] < found[1] < found[2]
