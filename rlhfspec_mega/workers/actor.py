"""The worker of role actor: an actor rank, its side of resharding, and the draft that learns beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlhfspec_mega.actor.actor import Actor
from rlhfspec_mega.actor.checkpoint_files import SavedPart
from rlhfspec_mega.actor.checkpoint_writer import WriteFailed
from rlhfspec_mega.actor.draft import ActorDraft
from rlhfspec_mega.actor.draft_learning import DraftLearning
from rlhfspec_mega.actor.rendezvous import ParallelRanks, Rendezvous
from rlhfspec_mega.algorithm.microbatch import MicroBatch, TokenLoss
from rlhfspec_mega.config.schema import ActorConfig
from rlhfspec_mega.drafting.trainer import RefreshReport
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.observe.spans import SpanRecorder
from rlhfspec_mega.resharding.buckets import Bucket
from rlhfspec_mega.resharding.export import WeightExporter, send_tensors
from rlhfspec_mega.resharding.transport import Sender
from rlhfspec_mega.types import Span, WeightTarget


class ActorWorker(Actor):
    """An Actor that also sends its weights, and a draft's if one was started; arguments as Actor's.

    Args:
        deterministic: refuse operations whose result depends on timing (torch.use_deterministic_algorithms).
    """

    def __init__(
        self,
        shape: ModelShape,
        config: ActorConfig,
        rendezvous: Rendezvous,
        deterministic: bool = False,
        **settings: Any,
    ) -> None:
        torch.use_deterministic_algorithms(deterministic)
        super().__init__(shape, config, rendezvous, **settings)
        self._exporter = WeightExporter(self)
        self._senders: dict[str, Sender] = {}
        self._draft: ActorDraft | None = None
        self._spans = SpanRecorder()

    def grid_position(self) -> ParallelRanks:
        """Where this rank stands in the TP x PP x DP grid."""
        return self.ranks

    def take_spans(self) -> list[Span]:
        """What this rank did since the last call, for the timeline."""
        return self._spans.take()

    def update(self, batches: Sequence[MicroBatch], loss: TokenLoss, metrics: Sequence[str]) -> dict[str, float]:
        """See Actor.update."""
        with self._spans.measure("update", micro_batches=len(batches)):
            return super().update(batches, loss, metrics)

    # The draft

    def start_draft(self, path: Path, learning: DraftLearning | None) -> None:
        """Hold a draft from its directory, to learn from now on if told how."""
        self._draft = ActorDraft(self.chunks, self.shape, path, learning, self.device)

    def refresh_draft(self, steps: int | None, seconds: float | None) -> RefreshReport | None:
        """Train the draft by count or by time; the report on the rank that has it."""
        assert self._draft is not None
        with self._spans.measure("draft refresh"):
            return self._draft.refresh(steps, seconds)

    def logprobs(
        self, batches: Sequence[MicroBatch], use_reference: bool, refresh_follows: bool = False
    ) -> dict[int, tuple[list[float], float]] | None:
        """See Actor.logprobs; a draft learns from what the actor itself computes (see ActorDraft.learning_from)."""
        with self._spans.measure("reference" if use_reference else "logprobs", micro_batches=len(batches)):
            if self._draft is None or use_reference:
                return super().logprobs(batches, use_reference)
            with self._draft.learning_from(batches, refresh_follows):
                return super().logprobs(batches, use_reference)

    def save(self, directory: Path) -> SavedPart:
        """See Actor.save; with the draft."""
        part = super().save(directory)
        if self._draft is None or part.failure is not None:
            return part
        try:
            return SavedPart(part.files | self._draft.save(directory), None)
        except WriteFailed as error:
            return SavedPart({}, str(error))

    def load(self, directory: Path) -> bool:
        """See Actor.load; with the draft."""
        same_grid = super().load(directory)
        if self._draft is not None:
            self._draft.load(directory)
        return same_grid

    # Resharding

    def weight_names(self, target: WeightTarget) -> list[str]:
        """Names of the tensors that this rank's pipeline stage (of a draft: this rank) holds."""
        if target is WeightTarget.ACTOR:
            return self._exporter.names()
        return list(self._draft.weights()) if self._draft is not None else []

    def connect(self, stream: str, address: Any, owner: int) -> None:
        """Make the sending end of a transport under the name `stream`, in place of the last one of this name."""
        if stream in self._senders:
            self._senders[stream].close()
        self._senders[stream] = address.sender(owner)

    def send_weights(
        self, stream: str, buckets: Sequence[Bucket], target: WeightTarget = WeightTarget.ACTOR
    ) -> dict[int, int]:
        """Send this stage's buckets; checksums on the stage's first tensor-parallel rank."""
        sender = self._senders.get(stream)
        with self._spans.measure("send weights", target=target.value):
            if target is WeightTarget.ACTOR:
                return self._exporter.send(buckets, sender)
            assert self._draft is not None
            return send_tensors(self._draft.weights(), buckets, sender) if sender is not None else {}
