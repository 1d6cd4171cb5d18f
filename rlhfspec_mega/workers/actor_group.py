"""The driver's view of the actor: sequences in, log-probs or one update out, whatever the parallel layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhfspec_mega.actor.checkpoint_files import FileSum
from rlhfspec_mega.actor.draft_learning import DraftLearning
from rlhfspec_mega.algorithm.microbatch import MicroBatch, TokenLoss, TrainSequence, collate
from rlhfspec_mega.algorithm.packing import micro_batches
from rlhfspec_mega.cluster.interface import Call, WorkerGroup
from rlhfspec_mega.config.schema import ActorConfig
from rlhfspec_mega.drafting.trainer import RefreshReport
from rlhfspec_mega.errors import CheckpointError, RunError
from rlhfspec_mega.types import Span


class ActorGroup:
    """All actor ranks.

    Args:
        max_tokens: padded tokens of a micro-batch, at most.

    Attributes:
        draft_rank: the one that holds and trains a draft.
    """

    def __init__(self, group: WorkerGroup, config: ActorConfig, max_tokens: int) -> None:
        self._group, self._config, self._max_tokens = group, config, max_tokens
        positions = group.call("grid_position", phase="start actor")
        self._dp_rank = [position.dp for position in positions]
        last_stage = max(position.pp for position in positions)
        self.draft_rank = next(
            rank for rank, place in enumerate(positions) if (place.tp, place.pp, place.dp) == (0, last_stage, 0)
        )

    def load_weights(self, path: Path) -> None:
        """Start from a Hugging Face directory."""
        self._group.call("load_weights", path, phase="load weights")

    def freeze_reference(self) -> None:
        """Keep the weights of now as the reference."""
        self._group.call("freeze_reference", phase="load weights")

    def logprobs(
        self, sequences: Sequence[TrainSequence], *, use_reference: bool, refresh_follows: bool = False
    ) -> tuple[list[list[float]], float]:
        """Log-probs of every sequence's response tokens, and the mean entropy per token in nats.

        Args:
            refresh_follows: whether the draft, if there is one, is refreshed before the next call.
        """
        phase = "reference" if use_reference else "logprobs"
        arguments = [(batches, use_reference, refresh_follows) for batches in self._batches(sequences)]
        found: dict[int, tuple[list[float], float]] = {}
        for answer in self._group.scatter("logprobs", arguments, phase):
            found |= answer or {}
        if len(found) != len(sequences):
            raise RunError(f"In phase '{phase}', the actor scored {len(found)} of {len(sequences)} sequences.")
        tokens = sum(sequence.response_length for sequence in sequences)
        entropy = sum(summed for _, summed in found.values()) / max(tokens, 1)
        return [found[index][0] for index in range(len(sequences))], entropy

    def update(self, sequences: Sequence[TrainSequence], loss: TokenLoss, metrics: Sequence[str]) -> dict[str, float]:
        """One optimizer step on all sequences; see Actor.update for the metrics."""
        arguments = [(batches, loss, metrics) for batches in self._batches(sequences)]
        return self._group.scatter("update", arguments, "update")[0]

    def start_draft(self, path: Path, learning: DraftLearning | None) -> None:
        """Hold a draft from its directory beside the actor.

        Args:
            learning: how it learns from every log-prob pass of the actor from now on; None: not at all.
        """
        self._group.call("start_draft", path, learning, phase="start draft")

    def refresh_draft(self, *, steps: int | None, seconds: float | None) -> RefreshReport:
        """Train the draft on what it has kept, by count or by time."""
        reports = self._group.call("refresh_draft", steps, seconds, phase="draft")
        return next(report for report in reports if report is not None)

    def start_refresh(self, seconds: float) -> list[Call]:
        """Begin `refresh_draft` by time; the calls' results are its report and None of the other ranks."""
        return [self._group.start(rank, "refresh_draft", None, seconds) for rank in range(self._group.size)]

    def take_spans(self) -> list[list[Span]]:
        """What each rank did since the last call."""
        return self._group.call("take_spans", phase="update")

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must have in common with this actor to be loaded, as JSON."""
        return self._group.call("identity", phase="checkpoint", ranks=[0])[0]

    def save(self, directory: Path) -> dict[str, FileSum]:
        """Write a distributed checkpoint into an existing empty directory; its files by name.

        Raises:
            CheckpointError: a rank could not write; files may be left, the ranks are as before.
        """
        parts = self._group.call("save", directory, phase="checkpoint")
        if parts[0].failure is not None:
            raise CheckpointError(parts[0].failure)
        return {name: file_sum for part in parts for name, file_sum in part.files.items()}

    def first_damage(self, directory: Path, files: Mapping[str, FileSum]) -> str | None:
        """What is wrong with a damaged file of a distributed checkpoint, None when there is none; ranks share the work.

        Files are dealt out by falling size, so that the ranks read about as much each.
        """
        names = sorted(files, key=lambda name: files[name].size, reverse=True)
        ranks = range(self._group.size)
        arguments = [(directory, {name: files[name] for name in names[rank :: len(ranks)]}) for rank in ranks]
        found = self._group.scatter("verify", arguments, "load checkpoint")
        return next((damage for damage in found if damage is not None), None)

    def load(self, directory: Path) -> bool:
        """Read a distributed checkpoint; whether the random state came with it (under the same parallel sizes)."""
        return all(self._group.call("load", directory, phase="load checkpoint"))

    def _batches(self, sequences: Sequence[TrainSequence]) -> list[list[MicroBatch]]:
        """Micro-batches of every worker: those of its data-parallel rank."""
        config = self._config
        multiple = config.tensor_parallel if config.sequence_parallel else 1
        plan = micro_batches(
            [len(sequence.tokens) for sequence in sequences],
            self._max_tokens,
            ranks=max(self._dp_rank) + 1,
            length_multiple=multiple,
            count_multiple=config.pipeline_parallel if config.virtual_pipeline > 1 else 1,
        )
        shards = [[collate(sequences, rows, multiple) for rows in rank_plan] for rank_plan in plan]
        return [shards[dp] for dp in self._dp_rank]
