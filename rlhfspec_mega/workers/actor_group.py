"""The driver's view of the actor: sequences in, log-probs or one update out, whatever the parallel layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhfspec_mega.algorithm.microbatch import MicroBatch, TokenLoss, TrainSequence, collate
from rlhfspec_mega.algorithm.packing import micro_batches
from rlhfspec_mega.cluster.interface import WorkerGroup
from rlhfspec_mega.config.schema import ActorConfig
from rlhfspec_mega.errors import RunError


class ActorGroup:
    """All actor ranks.

    Args:
        max_tokens: padded tokens of a micro-batch, at most.
    """

    def __init__(self, group: WorkerGroup, config: ActorConfig, max_tokens: int) -> None:
        self._group, self._config, self._max_tokens = group, config, max_tokens
        self._dp_rank = [position.dp for position in group.call("grid_position", phase="start actor")]

    def load_weights(self, path: Path) -> None:
        """Start from a Hugging Face directory."""
        self._group.call("load_weights", path, phase="load weights")

    def freeze_reference(self) -> None:
        """Keep the weights of now as the reference."""
        self._group.call("freeze_reference", phase="load weights")

    def logprobs(self, sequences: Sequence[TrainSequence], *, use_reference: bool) -> tuple[list[list[float]], float]:
        """Log-probs of every sequence's response tokens, and the mean entropy per token in nats."""
        phase = "reference" if use_reference else "logprobs"
        arguments = [(batches, use_reference) for batches in self._batches(sequences)]
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

    def save(self, directory: Path) -> None:
        """Write a distributed checkpoint into an existing empty directory."""
        self._group.call("save", directory, phase="checkpoint")

    def load(self, directory: Path) -> None:
        """Read a distributed checkpoint."""
        self._group.call("load", directory, phase="load checkpoint")

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
