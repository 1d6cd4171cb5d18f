"""Trees of one size: what nodes promise is what is accepted, and the rule is the best rate by it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfspec_mega.planning.draft_tokens import (
    MAX_SHARPNESS,
    ChainLength,
    Sharpness,
    StepTable,
    TreeSize,
    accepted_of_best,
)

COUNTS = (0, 1, 2, 4, 8)


def table(token: float) -> StepTable:
    return StepTable((1, 64), COUNTS, tuple(tuple(0.01 + token * b * n for n in COUNTS) for b in (1, 64)))


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 12), st.integers(0, 2**32 - 1))
def test_what_the_best_nodes_promise(batch: int, nodes: int, count: int, seed: int) -> None:
    survival = np.random.default_rng(seed).random((batch, nodes), np.float32)
    wanted = np.mean([sum(sorted(row, reverse=True)[:count]) for row in survival.tolist()])
    assert accepted_of_best(survival, count) == pytest.approx(wanted, rel=1e-5)


def test_until_it_has_seen_a_tree_it_is_a_chain_of_as_many_layers() -> None:
    rule, chain = TreeSize(table(1e-4), 3), ChainLength(StepTable((1,), (0, 1, 2, 3), ((0.01,) * 4,)))
    for one in (rule, chain):
        one.observe(3, [3, 1, 0])
    reached = chain.expected_accepted()
    assert rule.expected_accepted() == pytest.approx([reached[depth] for depth in (0, 1, 2, 3, 3)])


def test_layers_that_were_not_drafted_add_as_in_chains() -> None:
    rule = TreeSize(table(1e-4), 4)
    for _ in range(300):
        rule.observe(4, [4])  # nearly everything is accepted
    survival, depths = np.full((1, 2), 0.8, np.float32), np.array([[1, 1]])
    rule.observe_tree(survival, depths, deepest=1)
    found = rule.expected_accepted()
    assert found[:2] == pytest.approx([0.0, 0.8])
    assert found[2] == pytest.approx(2 * 1.6, rel=0.05) and found[3] == pytest.approx(4 * 1.6, rel=0.05)


def test_only_nodes_that_a_number_is_drafted_to_count() -> None:
    rule = TreeSize(table(1e-4), 3)
    rule.observe_tree(np.array([[0.9, 0.8, 0.7, 0.1]], np.float32), np.array([[1, 2, 3, 1]]), deepest=3)
    assert rule.expected_accepted() == pytest.approx([0.0, 0.9, 1.7, 2.5, 2.5])


def test_without_drafts_hope_comes_back() -> None:
    rule = TreeSize(table(1e-3), 4)
    rule.observe_tree(np.full((1, 4), 0.01, np.float32), np.ones((1, 4), np.int64), deepest=4)
    assert [rule.choose(1) for _ in range(2)][-1] == 0
    for _ in range(2000):
        rule.observe(0, [0])
    assert rule.choose(1) > 0


@pytest.mark.parametrize("scale", [0.2, 0.5, 1.0])
def test_sharpness_finds_the_scale_of_the_drafts_error(scale: float) -> None:
    """The target's scores are the draft's and Gumbel noise of this scale: a softmax of scores over it is exact."""
    rng, sharpness, found = np.random.default_rng(3), Sharpness(), []
    for _ in range(4000):
        draft = 3.0 * rng.standard_normal((8, 40)) + rng.gumbel(size=(8, 40))
        choice = (draft + scale * rng.gumbel(size=draft.shape)).argmax(axis=1)
        best = draft.argmax(axis=1)[:, None]
        chances = np.exp(sharpness.value * (draft - draft.max(axis=1, keepdims=True)))
        chances /= chances.sum(axis=1, keepdims=True)
        predicted = np.take_along_axis(chances, best, axis=1)
        realised = (best == choice[:, None]).any(axis=1)
        sharpness.observe(accepted_of_best(predicted.astype(np.float32), 1), realised.mean())
        found.append(sharpness.value)
    assert np.median(found[2000:]) == pytest.approx(1 / scale, rel=0.1)


def test_sharpness_has_bounds() -> None:
    sharpness = Sharpness()
    for _ in range(1000):
        sharpness.observe(0.0, 5.0)
    assert sharpness.value == MAX_SHARPNESS
