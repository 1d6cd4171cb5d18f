"""One number of draft tokens for a batch: the best rate, learnt from what was accepted."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.planning.draft_tokens import MARGIN, ChainLength, StepTable

CANDIDATES = (0, 1, 2, 4, 8)


def table_of(token: float) -> StepTable:
    """A target pass of 10 ms and `token` seconds for each token, a draft pass of 1 ms."""
    batches = 1, 8, 64
    return StepTable(
        batches, CANDIDATES, tuple(tuple(0.01 + 0.001 * n + token * b * (1 + n) for n in CANDIDATES) for b in batches)
    )


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
    chain = ChainLength(table_of(token))
    chain.observe(8, accepted)
    accepted_by = dict(zip(CANDIDATES, chain.expected_accepted(), strict=True))
    assert (np.diff(list(accepted_by.values())) >= 0).all() and accepted_by[8] <= 8

    def rate(n: int) -> float:
        return batch * (1 + accepted_by[n]) / (0.01 + 0.001 * n + token * batch * (1 + n))

    assert rate(chain.choose(batch)) * MARGIN >= max(map(rate, CANDIDATES)) * (1 - 1e-9)


def test_beyond_the_table_times_go_on_rising_and_never_fall() -> None:
    table = table_of(1e-3)
    assert table.seconds_at(100)[0] == pytest.approx(0.01 + 1e-3 * 100)
    falling = StepTable((1, 2), (0, 1), ((0.02, 0.03), (0.01, 0.04)))
    assert falling.seconds_at(4) == pytest.approx([0.01, 0.06])
    assert StepTable((4,), (0,), ((0.5,),)).seconds_at(9) == [0.5]


def test_acceptance_decides() -> None:
    assert fed(ChainLength(table_of(1e-4)), 1, 0.95, 100)[-1] == 8
    assert fed(ChainLength(table_of(1e-4)), 1, 0.4, 200)[-1] in (1, 2)


def test_large_batches_get_fewer() -> None:
    chain = ChainLength(table_of(1e-3))
    assert fed(chain, 64, 0.6, 100)[-1] < fed(chain, 1, 0.6, 100)[-1]


def test_plain_decoding_is_left_when_the_draft_has_recovered() -> None:
    chain = ChainLength(table_of(2e-3))
    lost = fed(chain, 32, 0.02, 1000)
    assert lost[200:].count(0) >= 0.97 * 800
    assert fed(chain, 1, 0.95, 800)[-1] == 8


def test_what_was_never_drafted_is_thought_of_as_the_layer_above() -> None:
    chain = ChainLength(table_of(1e-4))
    for _ in range(200):
        chain.observe(1, [1, 1, 1, 0])
    expected = chain.expected_accepted()
    assert expected[1] == pytest.approx(0.75, abs=0.01) and expected[2] - expected[1] < 0.75


WRONG: list[dict[str, Any]] = [
    {},
    {"batches": [1], "counts": [], "seconds": [[]]},
    {"batches": [1], "counts": [-1, 2], "seconds": [[0.1, 0.1]]},
    {"batches": [0], "counts": [0], "seconds": [[0.1]]},
    {"batches": [2, 1], "counts": [0], "seconds": [[0.1], [0.1]]},
    {"batches": [1, 2], "counts": [0], "seconds": [[0.1]]},
    {"batches": [1], "counts": [0], "seconds": [[float("nan")]]},
    {"batches": [1], "counts": [0], "seconds": [["fast"]]},
]


@pytest.mark.parametrize("data", WRONG)
def test_tables_that_are_none(data: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="table of step times"):
        StepTable.from_json(data)


def test_a_table_is_read_as_it_was_written() -> None:
    table = table_of(1e-3)
    assert StepTable.from_json(json.loads(json.dumps(table.as_json()))) == table
