"""Draft tokens from history in SGLang: the torch engine's tokens, whatever the index holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.sglang_engines import DEVICE, finish, ours, send, settings
from rlhfspec_mega.config.schema.generation import SpeculationConfig
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.rollout.sglang_engine import launch
from rlhfspec_mega.rollout.sglang_engine.history_control import HistoryControl
from rlhfspec_mega.rollout.sglang_engine.shapes import DraftShapes
from rlhfspec_mega.types import DraftingTally, FinishedText, GenerationRequest, GenerationResult
from rlhfspec_mega.workers.sglang_engine import SGLangEngineWorker
from tests.near_tie import assert_same
from tests.sglang.support import FP32, worker

NODES = 6  # draft tokens of a sample

Judge = Callable[[list[int]], torch.Tensor]


@pytest.fixture(scope="module")
def drafting(made: tuple[Path, Path]) -> SGLangEngineWorker:
    speculation = SpeculationConfig(policy="fixed", sources=["history"], num_draft_tokens=NODES, history_tokens=65536)
    return worker(made, drafts=False, history=speculation)


def decode(
    own: SGLangEngineWorker, requests: list[GenerationRequest]
) -> tuple[dict[str, GenerationResult], DraftingTally]:
    found, tally = finish(own.engine, requests), own.take_tally()
    assert tally is not None
    return found, tally


def control_of(own: SGLangEngineWorker) -> HistoryControl:
    assert own.controller.history is not None
    return own.controller.history


def test_the_tokens_are_those_of_plain_decoding(
    drafting: SGLangEngineWorker,
    requests: list[GenerationRequest],
    wanted: dict[str, GenerationResult],
    judge: Judge,
) -> None:
    """From an empty index. A token comes from prefill, from the target in a step, or from an accepted draft token."""
    control_of(drafting).forget()
    found, tally = decode(drafting, requests)
    assert_same(wanted, found, requests, judge)
    tokens = sum(len(result.tokens) for result in found.values())
    assert tokens == len(requests) + tally.sample_steps + tally.accepted
    assert tally.accepted > tally.sample_steps, "a group's members say much the same"


def test_earlier_samples_are_drafted_from(
    drafting: SGLangEngineWorker, requests: list[GenerationRequest], wanted: dict[str, GenerationResult], judge: Judge
) -> None:
    """With the samples themselves in the index nearly all draft tokens are accepted; with those of others none of it
    changes a token."""
    control_of(drafting).forget()
    empty = decode(drafting, requests)[1]
    own = [FinishedText(f"earlier {r.sample_id}", r.prompt_tokens, wanted[r.sample_id].tokens) for r in requests]
    drafting.remember(own, anew=True)
    found, tally = decode(drafting, requests)
    assert_same(wanted, found, requests, judge)
    assert tally.accepted / tally.sample_steps > 1.3 * empty.accepted / empty.sample_steps
    swapped = [
        FinishedText(text.sample_id, text.prompt, other.response) for text, other in zip(own, own[::-1], strict=True)
    ]
    drafting.remember(swapped, anew=True)
    assert_same(wanted, decode(drafting, requests)[0], requests, judge)


def test_it_sleeps_and_weights_wake_it(
    drafting: SGLangEngineWorker,
    made: tuple[Path, Path],
    requests: list[GenerationRequest],
    wanted: dict[str, GenerationResult],
    judge: Judge,
) -> None:
    drafting.sleep()
    send(drafting.engine, made[0], 1)
    some = requests[:8]
    assert_same({one.sample_id: wanted[one.sample_id] for one in some}, decode(drafting, some)[0], some, judge)
    assert drafting.pace(1.0).batches[-1] == 32


@pytest.mark.skipif(DEVICE == "cuda" and torch.cuda.device_count() < 2, reason="one GPU")
def test_two_ranks_verify_the_same_trees(
    made: tuple[Path, Path],
    requests: list[GenerationRequest],
    wanted: dict[str, GenerationResult],
    judge: Judge,
    tmp_path: Path,
) -> None:
    shapes = DraftShapes((NODES,), NODES)
    given = settings(made[0], None, **FP32, shapes=shapes, history_tokens=65536, tensor_parallel=2)
    engine, _ = ours(given, tmp_path / "engine")
    some = requests[:24]
    found = finish(engine, some)
    assert_same({one.sample_id: wanted[one.sample_id] for one in some}, found, some, judge)
    tally = HistoryControl(engine._engine, tmp_path / "engine").take_tally()
    assert sum(len(one.tokens) for one in found.values()) == len(some) + tally.sample_steps + tally.accepted
    assert tally.accepted > 0.5 * tally.sample_steps


def test_options_for_speculation_are_refused(made: tuple[Path, Path], tmp_path: Path) -> None:
    given = settings(made[0], None, history_tokens=4096, shapes=DraftShapes((4,), 4))
    chosen = replace(given, options={"speculative_num_draft_tokens": 40})
    with pytest.raises(UserError, match=r"speculative_num_draft_tokens: where history drafts"):
        launch.arguments(chosen, tmp_path)


def test_stand_in_lays_trees_out_as_sglang_does() -> None:
    """SGLang derives the same links on the host, where a grammar needs them."""
    from sglang.srt.speculative.ngram_worker import _derive_tree_links

    from rlhfspec_mega.rollout.sglang_engine.cpu_kernels.trees import reconstruct_indices_from_tree_mask

    random, batch, count = np.random.default_rng(0), 5, 9
    sees = np.zeros((batch, count, count), np.bool_)
    for tree in sees:
        tree[0, 0] = True
        for node in range(1, count):
            tree[node] = tree[random.integers(node)]
            tree[node, node] = True
    positions, lengths = torch.empty(batch * count, dtype=torch.int64), torch.arange(batch) + 3
    index, child, sibling = (torch.empty(batch, count, dtype=torch.int64) for _ in range(3))
    mask = torch.from_numpy(sees.ravel())
    reconstruct_indices_from_tree_mask(mask, lengths, positions, index, child, sibling, batch, count)
    wanted_child, wanted_sibling = _derive_tree_links(sees, batch, count)
    assert child.equal(wanted_child) and sibling.equal(wanted_sibling)
    assert positions.view(batch, count).equal(torch.from_numpy(sees.sum(axis=2) - 1) + lengths[:, None])
    assert index.flatten().equal(torch.arange(batch * count))
