"""What tests over real SGLang share: engines, acceptance there and in the torch engine, requests with and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.samples import load_target, word_prompts
from benchmarks.sglang_engines import DEVICE, SHARED_GPU, finish, ours, send, settings
from rlhfspec_mega.config.schema.generation import RolloutConfig, SGLangConfig, SpeculationConfig
from rlhfspec_mega.draft.directory import load_target_ids, read_draft_shape
from rlhfspec_mega.draft.shape import DraftShape
from rlhfspec_mega.models.hf_config import read_shape
from rlhfspec_mega.planning.tree import Batch, DraftingPolicy, DraftTree, StepRecord
from rlhfspec_mega.rollout.sglang_engine.choice import DraftingControl
from rlhfspec_mega.rollout.sglang_engine.engine import SGLangEngine
from rlhfspec_mega.rollout.sglang_engine.kv import KvAccess, kv_shapes
from rlhfspec_mega.rollout.torch_engine.engine import TorchEngine
from rlhfspec_mega.types import GenerationRequest, GenerationResult, WeightTarget
from rlhfspec_mega.workers.sglang_engine import SGLangEngineWorker

FP32: dict[str, Any] = {"dtype": "float32", "max_positions": 300, "slots": 32}


class Chains(DraftingPolicy):
    """A drafting policy: chains of so many draft tokens for all, however little they promise."""

    width = 1

    def __init__(self, count: int) -> None:
        self.max_depth = self.max_nodes = count
        self.drafted_steps = self.accepted = 0

    def recall(self, batch: Batch) -> None:
        return None

    def depth(self, batch: Batch) -> int:
        return self.max_depth

    def expand(self, batch: Batch, tree: DraftTree) -> np.ndarray:
        return np.arange(tree.size)[tree.last_layer]

    def choose(self, batch: Batch, tree: DraftTree) -> np.ndarray:
        return np.arange(tree.size)

    def observe(self, record: StepRecord) -> None:
        self.drafted_steps += record.batch.size
        self.accepted += int(record.accepted.sum())


def torch_acceptance(made: tuple[Path, Path], requests: list[GenerationRequest], count: int) -> float:
    """Draft tokens accepted of a sample's step, by the torch engine drafting chains of this length."""
    target, policy = load_target(made[0]), Chains(count)
    of_draft = read_draft_shape(made[1], target.shape)
    engine = TorchEngine(
        target.shape,
        slots=FP32["slots"],
        max_positions=FP32["max_positions"],
        prefill_chunk=512,
        dtype=torch.float32,
        device="cpu",
        draft=of_draft,
        draft_vocabulary=load_target_ids(made[1], of_draft),
        policy=policy,
    )
    send(engine, made[0], 0)
    send(engine, made[1], 0, WeightTarget.DRAFT)
    finish(engine, requests)
    return policy.accepted / policy.drafted_steps


def acceptance(control: DraftingControl) -> float:
    """Draft tokens accepted of a sample's step with draft tokens, since the last look."""
    tally = control.take_tally()
    return tally.accepted / max(tally.drafted_sample_steps, 1)


def tokens_of(found: dict[str, GenerationResult]) -> dict[str, list[int]]:
    return {name: result.tokens for name, result in found.items()}


def worker(
    made: tuple[Path, Path], drafts: bool = True, history: SpeculationConfig | None = None, **sglang: Any
) -> SGLangEngineWorker:
    """A worker as a run has it, with weights.

    Args:
        history: how it drafts from history, without a draft.
        sglang: fields of its configuration.
    """
    config = RolloutConfig(
        engine="sglang",
        max_running_requests=32,
        max_prompt_tokens=150,
        max_new_tokens=150,
        chunked_prefill_size=8192,
        sglang=SGLangConfig(**({"engine_kwargs": SHARED_GPU} | sglang)),
    )
    memory, draft = (0.1 if DEVICE == "cuda" else None), made[1] if drafts else None
    shape = read_shape(made[0])
    found = SGLangEngineWorker(
        shape,
        config,
        "float32",
        made[0],
        memory,
        True,
        DEVICE,
        draft=draft,
        drafting=history or SpeculationConfig(),
        history_tokens=history.history_tokens if history else 0,
    )
    send(found.engine, made[0], 0)
    return found


def engine_with_kv(
    made: tuple[Path, Path], of_draft: DraftShape, directory: Path, ranks: int, given: dict[str, Any]
) -> SGLangEngine:
    """An engine that drafts, with access to its KV, and its largest number of draft tokens."""
    engine, control = ours(settings(*made, **given, tensor_parallel=ranks), directory)
    assert control is not None
    control.force(given["shapes"].counts[-1])
    files = directory / "kv"
    files.mkdir()
    engine._kv = KvAccess(engine._engine, files, kv_shapes(of_draft.target, of_draft), given["dtype"], ranks)
    return engine


def prompts_of(model: Path, count: int) -> list[tuple[int, ...]]:
    return word_prompts(count, load_target(model).tokenizer, "eval")
