"""One number of draft tokens for a batch: the best rate, learnt from what was accepted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.planning.chain import MARGIN, ChainLength
from rlhfspec_mega.planning.cost import CostModel, StepCost

CANDIDATES = (0, 1, 2, 4, 8)


def cost_of(token: float) -> CostModel:
    """A target pass of 10 ms and `token` seconds for each token, a draft pass of 1 ms."""
    cost = CostModel(frozen=True)
    cost.fit(
        [
            StepCost(b, 0, b * (1 + n), b, n, b * max(n - 1, 0), 0.001 * n, 0.01 + token * b * (1 + n))
            for b in (1, 8, 64)
            for n in CANDIDATES
        ]
    )
    return cost


def fed(chain: ChainLength, batch: int, chance: float, steps: int) -> list[int]:
    rng, found = np.random.default_rng(0), []
    for _ in range(steps):
        count = chain.choose(batch)
        found.append(count)
        hits = rng.random((batch, max(count, 1))) < chance
        chain.observe(count, (hits.cumprod(axis=1).sum(axis=1) if count else np.zeros(batch, np.int64)).tolist())
    return found


@given(st.integers(1, 64), st.lists(st.integers(0, 8), min_size=1, max_size=30), st.floats(0.0, 0.002))
def test_no_candidate_promises_much_more(batch: int, accepted: list[int], token: float) -> None:
    cost = cost_of(token)
    chain = ChainLength(CANDIDATES, cost, length=100)
    chain.observe(8, accepted)
    expected, kv = chain.expected_accepted(), 100 * batch
    assert (np.diff(expected) >= 0).all() and expected[-1] <= 8

    def rate(n: int) -> float:
        drafting = cost.drafting(batch, kv, batch * (1 + n), max(n, 1), batch * max(n - 1, 0))
        return batch * (1 + expected[n]) / (drafting + float(cost.verify_seconds(batch, kv, batch * (1 + n))))

    assert rate(chain.choose(batch)) * MARGIN >= max(map(rate, CANDIDATES)) * (1 - 1e-9)


def test_acceptance_decides() -> None:
    assert fed(ChainLength(CANDIDATES, cost_of(1e-4), 100), 1, 0.95, 100)[-1] == 8
    assert fed(ChainLength(CANDIDATES, cost_of(1e-4), 100), 1, 0.4, 200)[-1] in (1, 2)


def test_large_batches_get_fewer() -> None:
    chain = ChainLength(CANDIDATES, cost_of(1e-3), 100)
    assert fed(chain, 64, 0.6, 100)[-1] < fed(chain, 1, 0.6, 100)[-1]


def test_plain_decoding_is_left_when_the_draft_has_recovered() -> None:
    chain = ChainLength(CANDIDATES, cost_of(2e-3), 100)
    lost = fed(chain, 32, 0.02, 1000)
    assert lost[200:].count(0) >= 0.97 * 800
    assert fed(chain, 1, 0.95, 800)[-1] == 8


def test_what_was_never_drafted_is_thought_of_as_the_layer_above() -> None:
    chain = ChainLength(CANDIDATES, cost_of(1e-4), 100)
    for _ in range(200):
        chain.observe(1, [1, 1, 1, 0])
    expected = chain.expected_accepted()
    assert expected[1] == pytest.approx(0.75, abs=0.01) and expected[2] - expected[1] < 0.75


@pytest.mark.parametrize("candidates", [(), (-1, 2)])
def test_no_candidates(candidates: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="0 or more"):
        ChainLength(candidates, CostModel(), 100)
