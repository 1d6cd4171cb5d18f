"""The worker of role engine that decodes with SGLang."""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlhfspec_mega.cluster.sweeper import Sweeper
from rlhfspec_mega.config.schema import DraftingConfig, RolloutConfig
from rlhfspec_mega.draft.directory import read_draft_shape
from rlhfspec_mega.draft.shape import DraftShape
from rlhfspec_mega.errors import SilentEngineError, UserError
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.rollout_state import Throughput
from rlhfspec_mega.rollout.migration.messages import Meeting, Orders
from rlhfspec_mega.rollout.protocol import SampleSnapshot
from rlhfspec_mega.rollout.sglang_engine.choice import FREE
from rlhfspec_mega.rollout.sglang_engine.control import DraftingControl
from rlhfspec_mega.rollout.sglang_engine.engine import SGLangEngine
from rlhfspec_mega.rollout.sglang_engine.kv import DRAFT, TARGET, KvAccess
from rlhfspec_mega.rollout.sglang_engine.launch import EngineSettings, start
from rlhfspec_mega.rollout.sglang_engine.profile import Profile, measure
from rlhfspec_mega.rollout.sglang_engine.shapes import DraftShapes, shapes_of
from rlhfspec_mega.types import DraftingTally, EngineReport, TensorInfo, WeightTarget
from rlhfspec_mega.workers.scoring import ReferenceSettings
from rlhfspec_mega.workers.serving import ServingEngine

MEMORY = Path("/dev/shm")  # a file system in memory, on Linux
_sweepers: list[Sweeper] = []  # they live as long as this process


class SGLangEngineWorker(SGLangEngine, ServingEngine):
    """An SGLangEngine that also receives weights, takes samples that began elsewhere, and scores finished ones.

    Starts SGLang on the GPUs that it sees and measures its steps, which takes minutes.

    Args:
        model: Hugging Face directory of a model of this shape.
        memory: share of a GPU's memory for weights and KV; None: SGLang's choice.
        sleeps: gives its GPU memory back when told to.
        device: cuda, or cpu for checking.
        deterministic: decide nothing by the clock: draft a fixed number of tokens and measure no steps.
        draft: directory of an EAGLE-3 draft; None: plain decoding.
        reference: what to score with; None: this engine does not.

    Raises UserError where KV has no room for the longest sample, and what `start` raises.
    """

    turn_seconds = 0.01

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
        drafting: DraftingConfig | None = None,
        reference: ReferenceSettings | None = None,
    ) -> None:
        directory, positions = files_of_engine(), config.max_prompt_tokens + config.max_new_tokens
        shapes, fixed = shapes_of(drafting, config.sglang.trees) if draft and drafting else (DraftShapes(), None)
        if deterministic and fixed is None:
            shapes, fixed = shapes.with_middle_only()
        settings = EngineSettings(
            model=model,
            draft=draft,
            shapes=shapes,
            fixed=fixed,
            collapse_ratio=drafting.collapse_ratio if drafting else 0.0,
            slots=config.slots,
            max_positions=positions,
            prefill_chunk=config.prefill_chunk,
            dtype=dtype,
            tensor_parallel=config.sglang.tensor_parallel,
            memory=memory,
            sleeps=sleeps,
            device=device,
            options=config.sglang.options,
        )
        engine = start(settings, directory)
        of_kv = kv_shapes(shape, read_draft_shape(draft, shape) if draft else None)
        kv = None
        if divides(config.sglang.tensor_parallel, of_kv):
            kv = KvAccess(engine, directory, of_kv, dtype, config.sglang.tensor_parallel)
        super().__init__(engine, config.slots, positions, kv)
        if (room := self.kv_room) is not None and room < settings.longest:
            raise UserError(
                f"SGLang has room for {room} tokens of KV and a sample may take {settings.longest}: raise "
                "rollout.sglang.memory (or options.max_total_tokens), or lower rollout.max_new_tokens."
            )
        self._control = DraftingControl(engine, directory) if draft else None
        self._profile = None if deterministic else self._measure(shapes, positions // 2, shape.vocab_size)
        self._shapes = shapes
        if device == "cuda":  # SGLang's processes then read a bucket where it lies (CUDA IPC)
            torch.cuda.init()
            self.weights_device = device
        self._accepted = 0.0  # draft tokens per step of a sample with draft tokens, lately
        if reference is not None:
            self.hold_reference(reference, positions, device)

    def _measure(self, shapes: DraftShapes, length: int, vocabulary: int) -> Profile:
        """Time its steps, on random weights, and have its choice of draft tokens go by them."""
        force = self._control.force if self._control else _nothing_to_force
        sizes = {"slots": self._slots, "length": length, "vocabulary": vocabulary}
        found = measure(self._engine, shapes.counts, force, **sizes)
        if self._control:
            self._control.learn_costs(found.table)
            self._control.force(FREE)
        return found

    def advance(self, samples: Sequence[SampleSnapshot], seconds: float, orders: Orders | None = None) -> EngineReport:
        """As ServingEngine's."""
        with _ending_if_silent():
            return super().advance(samples, seconds, orders)

    def begin_update(
        self, version: int, tensors: Sequence[TensorInfo], target: WeightTarget = WeightTarget.ACTOR
    ) -> None:
        """As SGLangEngine's."""
        with _ending_if_silent():
            super().begin_update(version, tensors, target)

    def pace(self, temperature: float) -> Throughput:
        """From the steps measured at start and the acceptance of late, taken to be alike at every depth."""
        assert self._profile is not None, "a deterministic run moves no samples"
        table, chance = self._profile.table, self._accepted / (1.0 + self._accepted)
        depths = map(self._shapes.depth_of, table.counts)
        tokens = [1.0 + sum(chance**layer for layer in range(1, depth + 1)) for depth in depths]
        best = (min(t / n for t, n in zip(row, tokens, strict=True)) for row in table.seconds)
        return Throughput(table.batches, tuple(best))

    def meet(self, temperature: float) -> Meeting:
        """As ServingEngine's; where KV cannot be copied, a sample that moves is prefilled."""
        meeting = super().meet(temperature)
        assert self._profile is not None
        prefill = meeting.prefill_seconds if math.isfinite(meeting.prefill_seconds) else self._profile.prefill_seconds
        copy = min(meeting.copy_seconds, prefill / 2) if self._kv else prefill / 2
        room = min(meeting.kv_tokens, self.kv_room or meeting.kv_tokens)
        return meeting._replace(prefill_seconds=prefill, copy_seconds=copy, kv_tokens=room)

    def clear(self) -> None:
        """Forget every sample, and those on their way here and from here."""
        with _ending_if_silent():
            super().clear()
        self.forget_moves()

    def end_update(self, version: int) -> None:
        """Make weights live; the draft is watched anew, and the memory of buckets is for SGLang and the actor again."""
        with _ending_if_silent():
            super().end_update(version)
        if self.weights_device == "cuda":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
        if self._control:
            self._control.weights_changed()

    def take_tally(self) -> DraftingTally | None:
        """What speculation did since the last call; None without a draft."""
        if self._control is None:
            return None
        tally = self._control.take_tally()
        if tally.drafted_sample_steps:
            self._accepted = tally.accepted / tally.drafted_sample_steps
        return tally

    def drafting_state(self) -> dict[str, Any] | None:
        """None: costs are measured anew at every start, and acceptance is learnt within seconds."""
        return None

    def sleep(self) -> None:
        """As SGLangEngine's; copies of samples that belong to others, and what scoring has left, go with it."""
        self.clear()
        super().sleep()
        if self.weights_device == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def _ending_if_silent() -> Iterator[None]:
    """Have an engine that has gone silent end its process: another one takes its place, as after any other death."""
    try:
        yield
    except SilentEngineError as error:
        print(f"{error} This engine ends; its samples go on elsewhere.", file=sys.stderr, flush=True)
        os._exit(1)


def files_of_engine() -> Path:
    """A directory in memory that goes when this process does, however it ends: workers are killed at a run's end."""
    directory = Path(tempfile.mkdtemp(prefix="rlhfspec_mega.sglang.", dir=MEMORY if MEMORY.is_dir() else None))
    _sweepers.append(Sweeper(directory))
    return directory


def kv_shapes(shape: ModelShape, draft: DraftShape | None) -> dict[str, tuple[int, int, int]]:
    """Layers, key-value heads and head size of target and draft, which has one layer."""
    found = {TARGET: (shape.num_layers, shape.num_kv_heads, shape.head_dim)}
    return found | ({DRAFT: (1, draft.num_kv_heads, draft.head_dim)} if draft else {})


def divides(ranks: int, shapes: Mapping[str, tuple[int, int, int]]) -> bool:
    """Whether each rank has heads of its own: otherwise some are kept by several ranks."""
    return all(heads % ranks == 0 for _, heads, _ in shapes.values())


def _nothing_to_force(count: int) -> None:
    """An engine that decodes plainly."""
