"""Agreement under shared noise in closed form, against the sampler itself and against its definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfspec_mega.draft.agreement import agreement, expected_accepted
from rlhfspec_mega.sampling.noise import gumbel, sample_seed
from rlhfspec_mega.sampling.select import select_tokens

DRAWS = 40_000


def random_pair(vocabulary: int, spread: float, likeness: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a target and of a draft that resembles it."""
    generator = torch.Generator().manual_seed(seed)
    target, other = torch.randn(2, vocabulary, generator=generator) * spread
    return target, likeness * target + (1 - likeness) * other


def drawn(logits: torch.Tensor, ids: torch.Tensor | int) -> torch.Tensor:
    """Tokens chosen under the noise of DRAWS samples: the engine's own sampler."""
    seeds = torch.tensor([sample_seed(1, 2, draw, 3) for draw in range(DRAWS)])
    noise = gumbel(seeds, torch.full((DRAWS,), 17), ids)
    return select_tokens(logits.expand(DRAWS, -1), torch.ones(DRAWS), noise).tokens


@pytest.mark.parametrize(("vocabulary", "spread", "likeness"), [(5, 1.0, 0.5), (40, 2.0, 0.7), (40, 0.3, 0.0)])
def test_the_sampler_agrees_as_often_as_the_formula_says(vocabulary, spread, likeness):
    target, draft = random_pair(vocabulary, spread, likeness, seed=vocabulary)
    wanted = float(agreement(target.softmax(-1)[None], draft.softmax(-1)[None]))
    found = float((drawn(target, vocabulary) == drawn(draft, vocabulary)).double().mean())
    assert abs(found - wanted) < 4 * math.sqrt(wanted * (1 - wanted) / DRAWS)


def test_a_reduced_draft_vocabulary_counts_what_it_lacks():
    target, draft = random_pair(12, 1.0, 0.6, seed=4)
    ids = torch.tensor([1, 3, 4, 8, 9, 11])
    wanted = float(agreement(target.softmax(-1)[ids][None], draft[ids].softmax(-1)[None]))
    found = float((drawn(target, 12) == ids[drawn(draft[ids], ids)]).double().mean())
    assert abs(found - wanted) < 4 * math.sqrt(wanted * (1 - wanted) / DRAWS)


@given(st.integers(2, 30), st.floats(0.1, 4), st.floats(0, 1), st.integers(0, 999))
@settings(max_examples=60, deadline=None)
def test_the_formula_lies_between_the_known_bounds(vocabulary, spread, likeness, seed):
    target, draft = random_pair(vocabulary, spread, likeness, seed)
    p, q = target.softmax(-1)[None], draft.softmax(-1)[None]
    exact = float(agreement(p, q))
    overlap = float(
        torch.minimum(p, q).sum()
    )  # no coupling agrees more often; this one at least overlap / (2 - overlap)
    assert overlap / (2 - overlap) - 1e-5 <= exact <= overlap + 1e-5
    assert exact == pytest.approx(float(agreement(q, p)), abs=1e-5)
    assert float(agreement(p, p)) == pytest.approx(1, abs=1e-5)
    ratios = torch.maximum(p[0] / p[0][:, None], q[0] / q[0][:, None]).double()
    assert exact == pytest.approx(float((1 / ratios.sum(-1)).sum()), abs=1e-5)
    top = p.topk(max(1, vocabulary // 2))
    outside = 1 - float(top.values.sum())
    assert exact - 2 * outside - 1e-5 <= float(agreement(top.values, q.gather(-1, top.indices))) <= exact + 1e-5


def test_tokens_of_no_probability_do_no_harm():
    p, q = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[0.25, 0.75, 0.0]])
    assert float(agreement(p, q)) == pytest.approx(0.25)
    assert float(agreement(p, torch.tensor([[0.0, 1.0, 0.0]]))) == pytest.approx(0)


def test_expected_accepted_length_is_that_of_a_chain():
    chances = torch.tensor([[0.5, 0.5, 1.0], [1.0, 0.0, 1.0]])
    assert expected_accepted(chances).tolist() == [[0.5, 0.75, 1.0], [1.0, 1.0, 1.0]]
