"""20,000 tokens through SGLang are the torch engine's, whatever is drafted in batches of 1 to 16; and samples of p."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks.sglang_engines import finish, ours, settings
from rlhfspec_mega.draft.directory import write_draft
from rlhfspec_mega.draft.shape import draft_shape, draft_tensors
from rlhfspec_mega.rollout.sglang_engine.choice import NOT_FIXED
from rlhfspec_mega.rollout.sglang_engine.shapes import chains, trees
from rlhfspec_mega.sampling.noise import sample_seed
from rlhfspec_mega.types import GenerationRequest, GenerationResult
from tests.e2e.conftest import SHAPE, make_model
from tests.near_tie import assert_same
from tests.sglang.conftest import requests_of, torch_results
from tests.sglang.support import FP32

# Shapes of drafts, numbers of draft tokens, and groups of requests, which come once per number and batch size.
DRAFTED = {"chains": (chains(8), (0, 5, NOT_FIXED), 6), "trees": (trees(12, 4, 4), (12, NOT_FIXED), 9)}
BATCHES = (1, 3, 8, 16)
TOKENS = 20_000


def at_most(engine: object, requests: list[GenerationRequest], batch: int) -> dict[str, GenerationResult]:
    """Decode in batches of this size."""
    found: dict[str, GenerationResult] = {}
    for first in range(0, len(requests), batch):
        found |= finish(engine, requests[first : first + batch])
    return found


@pytest.mark.parametrize("kind", DRAFTED)
def test_losslessness(
    kind: str, made: tuple[Path, Path], judge: Callable[[list[int]], torch.Tensor], tmp_path: Path
) -> None:
    """Each kind decodes half of the tokens: plainly (0), a fixed number of draft tokens, and adaptively (NOT_FIXED)."""
    shapes, counts, groups = DRAFTED[kind]
    requests = [replace(one, temperature=float(at % 2)) for at, one in enumerate(requests_of(made[0], groups))]
    wanted = torch_results(made[0], requests)
    engine, control = ours(settings(*made, **FP32 | {"slots": 16}, shapes=shapes), tmp_path / "engine")
    assert control is not None
    ends_within_drafts(requests, wanted, made[0], partial(finish, engine), judge)
    total = 0
    while total < TOKENS / len(DRAFTED):
        for count in counts:
            control.force(count)
            for batch in BATCHES:
                found = at_most(engine, requests, batch)
                assert_same(wanted, found, requests, judge)
                total += sum(len(result.tokens) for result in found.values())
    print(f"{kind}: {total} tokens")


def ends_within_drafts(
    requests: list[GenerationRequest],
    whole: dict[str, GenerationResult],
    model: Path,
    decode: Callable[[list[GenerationRequest]], dict[str, GenerationResult]],
    judge: Callable[[list[int]], torch.Tensor],
) -> None:
    """A sample's stop token and its limit come within tokens that one step accepts: the earlier one ends it."""
    chances = random.Random(0)
    early = []
    for one in requests:
        tokens = whole[one.sample_id].tokens
        end = chances.randrange(len(tokens))
        limit = end + chances.randint(1, 4)
        early.append(replace(one, stop_tokens=(tokens[end],), max_new_tokens=limit))
    assert_same(torch_results(model, early), decode(early), early, judge)


@pytest.mark.parametrize("drafted", [0, 3])
def test_chi_square(drafted: int, tmp_path: Path) -> None:
    """Sampled frequencies of first and second tokens equal the model's probabilities, with drafts and without."""
    count, shape = 6_000, replace(SHAPE, hidden_size=128, head_dim=32, num_layers=6, max_positions=512)
    model, prompt = make_model(tmp_path / "model", shape), (7, 30, 11)
    of_draft = draft_shape(shape)
    random = {info.name: 0.05 * torch.randn(info.shape) for info in draft_tensors(of_draft)}
    write_draft(tmp_path / "draft", of_draft, random)
    asked = [GenerationRequest(str(i), str(i), prompt, sample_seed(9, 0, i, 0), 2) for i in range(count)]
    engine, control = ours(settings(model, tmp_path / "draft", **FP32 | {"slots": 64}), tmp_path / "engine")
    assert control is not None
    control.force(drafted)
    found = finish(engine, asked)
    net = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    firsts = Counter(found[one.sample_id].tokens[0] for one in asked)
    top = firsts.most_common(1)[0][0]
    seconds = Counter(found[one.sample_id].tokens[1] for one in asked if found[one.sample_id].tokens[0] == top)
    for tokens, counts in ((prompt, firsts), ((*prompt, top), seconds)):
        with torch.no_grad():
            chances = net(input_ids=torch.tensor([tokens])).logits[0, -1].softmax(dim=-1)
        assert chi_square_tail(counts, chances) > 1e-4


def chi_square_tail(counts: Counter[int], chances: torch.Tensor) -> float:
    """Chance of frequencies at least as far off; rare tokens are one class."""
    total = sum(counts.values())
    expected = chances * total
    often = expected >= 5
    seen = torch.tensor([counts[token] for token in range(len(chances))], dtype=torch.float64)
    observed = torch.cat((seen[often], seen[~often].sum()[None]))
    wanted = torch.cat((expected[often], expected[~often].sum()[None])).clamp_min(1e-9)
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor((len(wanted) - 1) / 2.0), statistic.float() / 2.0))
