"""The engine worker that decodes with SGLang."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from rlhfspec_mega.cluster.sweeper import Sweeper
from rlhfspec_mega.config.schema.generation import RolloutConfig, SpeculationConfig
from rlhfspec_mega.draft.directory import read_draft_shape
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.rollout_state import Throughput
from rlhfspec_mega.rollout.migration.messages import PeerInfo
from rlhfspec_mega.rollout.sglang_engine.engine import SGLangEngine
from rlhfspec_mega.rollout.sglang_engine.kv import KvAccess, divides, kv_shapes
from rlhfspec_mega.rollout.sglang_engine.launch import EngineSettings, start
from rlhfspec_mega.rollout.sglang_engine.shapes import DraftShapes, shape_of_history, shapes_of
from rlhfspec_mega.types import DraftingTally, FinishedText
from rlhfspec_mega.workers.serving import EngineWorker
from rlhfspec_mega.workers.sglang_controller import SGLangController

MEMORY = Path("/dev/shm")  # a file system in memory, on Linux
_sweepers: list[Sweeper] = []  # kept alive as long as this process


class SGLangEngineWorker(EngineWorker):
    """An engine worker with an SGLangEngine and models of how fast it decodes.

    It starts SGLang on the GPUs that it sees and measures decode steps, which takes minutes. If SGLang goes silent, the
    worker ends its own process, and a new one is started in its place.

    Args:
        model: Hugging Face directory of a model of this shape.
        memory: share of a GPU's memory for weights and KV; None: SGLang's default.
        sleeps: whether it gives its GPU memory back on request.
        device: "cuda", or "cpu" for checking.
        deterministic: draft a fixed number of tokens and measure no steps, so that nothing depends on the clock.
        draft: directory of an EAGLE-3 draft; None: none.
        drafting: how the number of draft tokens is chosen.
        history_tokens: newest tokens that are kept to draft from, without a draft; 0: plain decoding.

    Raises UserError if the KV cache is too small for the longest sample, and what `start` raises.
    """

    engine: SGLangEngine

    def __init__(
        self,
        shape: ModelShape,
        config: RolloutConfig,
        dtype: str,
        model: Path,
        memory: float | None,
        sleeps: bool,
        device: str,
        deterministic: bool = False,
        draft: Path | None = None,
        drafting: SpeculationConfig | None = None,
        history_tokens: int = 0,
    ) -> None:
        directory, positions = make_engine_directory(), config.max_prompt_tokens + config.max_new_tokens
        shapes, fixed = DraftShapes(), None
        if draft and drafting:
            shapes, fixed = shapes_of(drafting, config.sglang.trees)
            if deterministic and fixed is None:
                shapes, fixed = shapes.with_middle_only()
        elif history_tokens and drafting:
            shapes = shape_of_history(drafting)
        settings = EngineSettings(
            model=model,
            draft=draft,
            shapes=shapes,
            fixed=fixed,
            collapse_ratio=drafting.collapse_ratio if drafting else 0.0,
            history_tokens=history_tokens,
            slots=config.max_running_requests,
            max_positions=positions,
            prefill_chunk=config.chunked_prefill_size,
            dtype=dtype,
            tensor_parallel=config.sglang.tensor_parallel,
            memory=memory,
            sleeps=sleeps,
            device=device,
            options=config.sglang.engine_kwargs,
        )
        sglang = start(settings, directory)
        of_kv, ranks = kv_shapes(shape, read_draft_shape(draft, shape) if draft else None), settings.tensor_parallel
        kv = KvAccess(sglang, directory, of_kv, dtype, ranks) if divides(ranks, of_kv) else None
        engine = SGLangEngine(sglang, config.max_running_requests, positions, kv, on_silence=_end_process)
        if (room := engine.kv_room) < settings.longest:
            raise UserError(
                f"SGLang has room for {room} tokens of KV and a sample may take {settings.longest}: raise "
                "rollout.sglang.mem_fraction_static (or "
                "rollout.sglang.engine_kwargs.max_total_tokens), or lower rollout.max_new_tokens."
            )
        self.controller = SGLangController(
            sglang, directory, shapes, drafts=draft is not None, recalls=history_tokens > 0
        )
        if not deterministic:
            self.controller.measure(config.max_running_requests, positions // 2, shape.vocab_size)
        self._on_gpu = device == "cuda"
        if self._on_gpu:  # SGLang's processes read the bucket in place, by CUDA IPC
            torch.cuda.init()
        super().__init__(engine, device if self._on_gpu else "cpu")

    def prepare(self) -> None:
        """Nothing to do: costs were measured at start."""

    def pace(self, temperature: float) -> Throughput:
        """Predicted decoding throughput by batch size, see SGLangController.pace; the same at every temperature."""
        return self.controller.pace()

    def join_migration(self, temperature: float) -> PeerInfo:
        """See EngineWorker.join_migration; adds the speeds and the size of the KV cache that SGLang reports."""
        copies = bool(self.engine.kv_layout(0).parts)
        return self.controller.complete(super().join_migration(temperature), self.engine.kv_room, copies)

    def end_update(self, version: int) -> None:
        """Make the received weights live and free the buckets; monitoring of the draft's acceptance starts anew."""
        super().end_update(version)
        if self._on_gpu:
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
        self.controller.weights_changed()

    def take_tally(self) -> DraftingTally | None:
        """What speculation did since the last call; None for plain decoding."""
        return self.controller.take_tally()

    def remember(self, texts: Sequence[FinishedText], anew: bool) -> None:
        """Draft from these samples, too; see HistoryDrafts.remember."""
        if self.controller.history:
            self.controller.history.remember(texts, anew)

    def drafting_state(self) -> None:
        """None: costs are measured at every start, and acceptance is learnt within seconds."""

    def sleep(self) -> None:
        """See SGLangEngine.sleep; copies of samples that were migrated away are dropped."""
        self.clear()
        self.engine.sleep()
        if self._on_gpu:
            torch.cuda.empty_cache()


def _end_process(sentence: str) -> NoReturn:
    print(f"{sentence} This engine ends; its samples go on elsewhere.", file=sys.stderr, flush=True)
    os._exit(1)


def make_engine_directory() -> Path:
    """A directory in memory that is removed when this process ends, in whatever way."""
    directory = Path(tempfile.mkdtemp(prefix="rlhfspec_mega.sglang.", dir=MEMORY if MEMORY.is_dir() else None))
    _sweepers.append(Sweeper(directory))
    return directory
