"""The torch engine's tokens and log-probs, whatever SGLang drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.sglang_engines import finish, ours, settings
from rlhfspec_mega.draft.directory import read_draft_shape
from rlhfspec_mega.draft.shape import draft_shape
from rlhfspec_mega.models.hf_config import read_shape
from rlhfspec_mega.rollout.sglang_engine.choice import NOT_FIXED, DraftingControl
from rlhfspec_mega.rollout.sglang_engine.engine import SGLangEngine
from rlhfspec_mega.rollout.sglang_engine.shapes import trees
from rlhfspec_mega.types import GenerationRequest, GenerationResult
from tests.near_tie import assert_same
from tests.sglang.support import FP32, acceptance, torch_acceptance

FIXED = 5  # draft tokens of the chains whose acceptance is compared with the torch engine's


@pytest.fixture(scope="module")
def engines(
    made: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[SGLangEngine, SGLangEngine, DraftingControl]:
    """One that decodes plainly, and one that drafts."""
    root = tmp_path_factory.mktemp("sglang")
    plain, _ = ours(settings(made[0], None, **FP32), root / "plain")
    drafting, control = ours(settings(*made, **FP32), root / "drafting")
    assert control is not None
    return plain, drafting, control


@pytest.fixture(scope="module")
def branching(
    made: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[SGLangEngine, DraftingControl]:
    """One that drafts trees."""
    chosen = settings(*made, **FP32, shapes=trees(16, 5, 4))
    engine, control = ours(chosen, tmp_path_factory.mktemp("trees") / "engine")
    assert control is not None
    return engine, control


@pytest.mark.parametrize("drafted", ["off", "adaptive", 0, 1, 3, FIXED, 8])
def test_identity(
    drafted: str | int,
    engines: tuple[SGLangEngine, SGLangEngine, DraftingControl],
    made: tuple[Path, Path],
    requests: list[GenerationRequest],
    wanted: dict[str, GenerationResult],
    judge: Callable[[list[int]], torch.Tensor],
) -> None:
    """Off, adaptive and every forced number of draft tokens; as many of a chain are accepted as by the torch engine."""
    plain, drafting, control = engines
    if drafted != "off":
        control.force(NOT_FIXED if drafted == "adaptive" else int(drafted))
    found = finish(plain if drafted == "off" else drafting, requests)
    assert_same(wanted, found, requests, judge)
    if drafted == FIXED:
        own, theirs = acceptance(control), torch_acceptance(made, requests, FIXED)
        assert own == pytest.approx(theirs, rel=0.1), "the draft's positions or its noise are not the target's"


@pytest.mark.parametrize("drafted", ["adaptive", 0, 2, 5, 16])
def test_identity_of_trees(
    drafted: str | int,
    branching: tuple[SGLangEngine, DraftingControl],
    requests: list[GenerationRequest],
    wanted: dict[str, GenerationResult],
    judge: Callable[[list[int]], torch.Tensor],
) -> None:
    """Trees of every size; larger ones have more of their nodes accepted."""
    engine, control = branching
    control.take_tally()
    control.force(NOT_FIXED if drafted == "adaptive" else int(drafted))
    assert_same(wanted, finish(engine, requests), requests, judge)
    if drafted == 16:
        of_trees = acceptance(control)
        control.force(5)
        finish(engine, requests)
        assert of_trees > acceptance(control) > 1.0, "the likeliest nodes are not the ones that are taken"


def test_the_pair_is_worth_comparing(
    made: tuple[Path, Path], requests: list[GenerationRequest], wanted: dict[str, GenerationResult]
) -> None:
    """Samples are long, differ, and end in both ways; the draft is one of this model."""
    lengths = [len(result.tokens) for result in wanted.values()]
    assert sum(lengths) > 4000 and len(set(lengths)) > 20
    assert len({result.finish_reason for result in wanted.values()}) == 2
    assert read_draft_shape(made[1], read_shape(made[0])).taps == draft_shape(read_shape(made[0])).taps
