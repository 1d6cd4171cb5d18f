"""How fast an SGLang engine decodes: steps measured at start, and how many draft tokens are accepted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rlhfspec_mega.planning.rollout_state import Throughput
from rlhfspec_mega.rollout.migration.messages import PeerInfo
from rlhfspec_mega.rollout.sglang_engine.choice import NOT_FIXED, DraftingControl
from rlhfspec_mega.rollout.sglang_engine.history_control import HistoryControl
from rlhfspec_mega.rollout.sglang_engine.profile import Profile, measure
from rlhfspec_mega.rollout.sglang_engine.shapes import DraftShapes
from rlhfspec_mega.types import DraftingTally


class SGLangController:
    """The measured step times of one SGLang engine, and the acceptance that SGLang reports.

    Args:
        engine: a started `sglang.Engine`.
        directory: directory of the engine's files.
        shapes: numbers of draft tokens that the engine chooses from.
        drafts: whether it has a draft.
        recalls: whether history drafts instead.

    Attributes:
        control, history: of a draft and of history; None without them.
        profile: None before `measure`.
        accepted: recent mean of accepted draft tokens per step of a sample that has draft tokens.
    """

    def __init__(self, engine: Any, directory: Path, shapes: DraftShapes, drafts: bool, recalls: bool) -> None:
        self._engine, self._shapes = engine, shapes
        self.control = DraftingControl(engine, directory) if drafts else None
        self.history = HistoryControl(engine, directory) if recalls else None
        self.profile: Profile | None = None
        self.accepted = 0.0

    def measure(self, slots: int, length: int, vocabulary: int) -> None:
        """Time decode steps of the idle engine on random weights; its choice of draft tokens goes by them.

        Args:
            length: tokens of a typical sample halfway through decoding.
        """
        force = self.control.force if self.control else lambda count: None
        sizes = {"slots": slots, "length": length, "vocabulary": vocabulary}
        self.profile = measure(self._engine, self._shapes.counts, force, **sizes)
        if self.control:
            self.control.learn_costs(self.profile.table)
            self.control.force(NOT_FIXED)
        if self.history:
            self.history.forget()  # what random weights have said

    def pace(self) -> Throughput:
        """Predict throughput from measured step times and recent acceptance, taken to be the same at every depth."""
        table, chance = self._measured.table, self.accepted / (1.0 + self.accepted)
        depths = map(self._shapes.depth_of, table.counts)
        tokens = [1.0 + sum(chance**layer for layer in range(1, depth + 1)) for depth in depths]
        best = (min(t / n for t, n in zip(row, tokens, strict=True)) for row in table.seconds)
        return Throughput(table.batches, tuple(best))

    def complete(self, peer: PeerInfo, kv_room: int, copies: bool) -> PeerInfo:
        """Add the speeds and KV capacity that SGLang reports to `peer`.

        Where KV cannot be copied, a migrated sample is prefilled again.

        Args:
            kv_room: tokens of KV that SGLang has room for.
            copies: whether KV can be copied.
        """
        known = math.isfinite(peer.prefill_seconds)
        prefill = peer.prefill_seconds if known else self._measured.prefill_seconds
        copy = min(peer.copy_seconds, prefill / 2) if copies else prefill / 2
        room = min(peer.kv_tokens, kv_room)
        return peer._replace(prefill_seconds=prefill, copy_seconds=copy, kv_tokens=room)

    def take_tally(self) -> DraftingTally | None:
        """What speculation did since the last call; None for plain decoding."""
        source = self.control or self.history
        if source is None:
            return None
        tally = source.take_tally()
        if tally.drafted_sample_steps:
            self.accepted = tally.accepted / tally.drafted_sample_steps
        return tally

    def weights_changed(self) -> None:
        """Monitoring of the draft's acceptance starts anew."""
        if self.control:
            self.control.weights_changed()

    @property
    def _measured(self) -> Profile:
        assert self.profile is not None, "a deterministic run moves no samples"
        return self.profile
