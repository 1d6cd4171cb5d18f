"""KV of samples on the move: what is read and what is kept is what a prefill of the same tokens makes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.sglang_engines import DEVICE, finish
from rlhfspec_mega.draft.directory import read_draft_shape
from rlhfspec_mega.models.hf_config import read_shape
from rlhfspec_mega.rollout.protocol import DraftPast
from rlhfspec_mega.rollout.sglang_engine.engine import SGLangEngine
from rlhfspec_mega.rollout.sglang_engine.kv import DRAFT, TARGET
from rlhfspec_mega.rollout.sglang_engine.shapes import DraftShapes, chains, trees
from rlhfspec_mega.sampling.noise import sample_seed
from rlhfspec_mega.types import GenerationRequest
from tests.sglang.support import engine_with_kv, prompts_of

CLOSE = 1e-4
PATIENCE = 30.0


def request(number: int, tokens: tuple[int, ...], new: int) -> GenerationRequest:
    """One that does not end by itself before it has been looked at."""
    return GenerationRequest(f"{number}", f"{number}", tokens, sample_seed(5, 0, number, 1), new, temperature=1.0)


def until(engine: SGLangEngine, name: str, tokens: int) -> None:
    """Decode until the sample has so many tokens of prompt and response."""
    end = time.monotonic() + PATIENCE
    while (settled := engine.committed_positions(name)) is None or settled[TARGET] < tokens - 1:
        engine.poll(0.002)
        assert engine.has_sample(name) and time.monotonic() < end


def read(engine: SGLangEngine, name: str, last: int) -> dict[str, torch.Tensor]:
    return {part: engine.committed_kv(name, part, 0, last) for part in (TARGET, DRAFT)}


def prefilled(engine: SGLangEngine, number: int, tokens: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """KV of these tokens as a prefill makes it, on an engine that knows nothing of them."""
    engine.clear()
    engine._flush_cache()
    engine.submit([request(number, tokens, 60)])
    until(engine, f"{number}", len(tokens) + 1)
    found = read(engine, f"{number}", len(tokens) - 1)
    engine.abort([f"{number}"])
    return found


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for part in (TARGET, DRAFT):
        rows = min(one[part].shape[3], other[part].shape[3])
        assert rows > 20, f"hardly any KV of the {part} was read"
        difference = (one[part][:, :, :, :rows] - other[part][:, :, :, :rows]).abs().amax(dim=(0, 1, 2, 4))
        wrong = (difference > CLOSE).nonzero().flatten().tolist()
        assert not wrong, f"KV of the {part} differs in rows {wrong[:10]} of {rows}"


@pytest.mark.parametrize(
    ("shapes", "ranks"), [(chains(5), (1, 1)), (trees(8, 4, 3), (2, 1))], ids=["chains", "trees_tp2_to_tp1"]
)
def test_kv_that_moved_is_that_of_a_prefill(
    shapes: DraftShapes, ranks: tuple[int, int], made: tuple[Path, Path], tmp_path: Path
) -> None:
    """Read at the source while it decodes; kept at the destination, decoded on, read there; both against a prefill."""
    if DEVICE == "cuda" and torch.cuda.device_count() < max(ranks):
        pytest.skip("needs as many GPUs as ranks")
    shape = read_shape(made[0])
    of_draft = read_draft_shape(made[1], shape)
    given: dict[str, Any] = {"shapes": shapes, "slots": 8, "max_positions": 400, "dtype": "float32"}
    source, destination = (
        engine_with_kv(made, of_draft, tmp_path / str(place), count, given) for place, count in enumerate(ranks)
    )
    for number, prompt in enumerate(prompts_of(made[0], 3)):
        name, prompt = f"{number}", prompt[-100:]
        source.submit([request(number, prompt, 200)])
        until(source, name, len(prompt) + 40)
        settled = source.committed_positions(name)
        assert settled is not None
        of_source = read(source, name, settled[TARGET])
        snapshot = source.export_sample(name)
        tokens = (*prompt, *snapshot.tokens)
        assert_close(of_source, prefilled(destination, 100 + number, tokens))
        destination._flush_cache()
        rows = min(kv.shape[3] for kv in of_source.values())
        snapshot.kv = of_source[TARGET][:, :, :, :rows]
        snapshot.draft = DraftPast(of_source[DRAFT][:, :, :, :rows], torch.empty(0, 0))
        spared = destination.stats()["spared_tokens"]
        destination.import_sample(snapshot)
        until(destination, name, len(tokens) + 20)
        assert destination.stats()["spared_tokens"] - spared >= rows - 1, "copied KV was not found"
        moved = read(destination, name, len(tokens) + 10)
        all_tokens = (*prompt, *destination.abort([name])[0].tokens)
        assert_close(moved, prefilled(source, 200 + number, all_tokens[: len(tokens) + 11]))


def test_members_of_a_group_share_their_prompt(made: tuple[Path, Path], tmp_path: Path) -> None:
    """The second member of a group finds its prompt's KV; tokens are those of members that do not."""
    shape = read_shape(made[0])
    of_draft = read_draft_shape(made[1], shape)
    given: dict[str, Any] = {"shapes": chains(5), "slots": 8, "max_positions": 300, "dtype": "float32"}
    engine = engine_with_kv(made, of_draft, tmp_path / "engine", 1, given)
    prompt = prompts_of(made[0], 1)[0][-100:]
    members = [request(number, prompt, 30) for number in range(6)]
    apart: dict[str, list[int]] = {}
    for one in members:
        engine._flush_cache()
        apart |= {name: result.tokens for name, result in finish(engine, [one]).items()}
    computed = engine.stats()["prefill_tokens"]
    together = {name: result.tokens for name, result in finish(engine, members).items()}
    assert together == apart
    assert engine.stats()["prefill_tokens"] - computed < 2 * len(prompt), "each member was prefilled anew"
