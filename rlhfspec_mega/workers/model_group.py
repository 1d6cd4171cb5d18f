"""The driver's view of one Megatron model: samples in, log-probs or gradients out, whatever the parallel layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhfspec_mega.cluster.interface import Call, WorkerGroup
from rlhfspec_mega.errors import CheckpointError, RunError
from rlhfspec_mega.megatron.checkpoint_files import FileSum
from rlhfspec_mega.megatron.description import ModelDescription
from rlhfspec_mega.planning.pipeline.baselines import rising_then_falling
from rlhfspec_mega.resharding.buckets import Bucket
from rlhfspec_mega.rl.experience import Experience, Floats
from rlhfspec_mega.rl.microbatch import Objective, Shard, TokenLoss
from rlhfspec_mega.rl.packing import Batching, micro_batches
from rlhfspec_mega.types import Span, WeightTarget


class ModelGroup:
    """The driver's handle of one model on all ranks of a group.

    Args:
        workers: MegatronWorkers that hold a model of this description.
        batching: how samples become micro-batches.

    Attributes:
        positions: position of each rank in the model's grid.
    """

    def __init__(self, workers: WorkerGroup, description: ModelDescription, batching: Batching) -> None:
        self._workers, self.description, self._batching = workers, description, batching
        self.positions = workers.call("grid_position", description.name, phase=f"start {description.name}")

    def load_weights(self, path: Path) -> None:
        """Load weights from a Hugging Face directory."""
        self._call("load_weights", path, phase="load weights")

    def logprobs(self, samples: Experience, phase: str, *, refresh_follows: bool = False) -> tuple[Floats, float]:
        """The log-prob of every response token, as a flat column, and the mean entropy per response token in nats.

        Args:
            refresh_follows: whether the draft, if there is one, is refreshed before the next call.
        """
        column, entropy = self._column(samples, phase, refresh_follows)
        return column, entropy / max(len(column), 1)

    def values(self, samples: Experience, phase: str) -> Floats:
        """The value of the state before every response token, as a flat column; only of a model with a value head."""
        return self._column(samples, phase)[0]

    def _column(self, samples: Experience, phase: str, refresh_follows: bool = False) -> tuple[Floats, float]:
        """A number for every response token, and the sum of entropies."""
        shards = self.shards(samples)
        return self._placed(samples, shards, self._scatter("columns", shards, refresh_follows, phase=phase), phase)

    def _placed(
        self, samples: Experience, shards: Sequence[Shard], answers: Sequence[Any], phase: str
    ) -> tuple[Floats, float]:
        """What the ranks returned, in the order of the samples, and the sum of entropies."""
        name = self.description.name
        column, scored, entropy = np.full(samples.response_offsets[-1], np.nan, np.float32), 0, 0.0
        for position, answer in zip(self.positions, answers, strict=True):
            if answer is not None:
                shard = shards[position.dp]
                samples.place(column, shard.indices, answer[0])
                scored, entropy = scored + len(shard.indices), entropy + answer[1]
        if scored != len(samples):
            raise RunError(f"In phase '{phase}', the {name} scored {scored} of {len(samples)} samples.")
        return column, entropy

    def accumulate(
        self, samples: Experience, loss: TokenLoss, metrics: Sequence[str], *, together: int = 1
    ) -> dict[str, float]:
        """Accumulate the gradients of a mini-batch.

        Args:
            together: so many samples that follow each other lie in the same micro-batch.

        Returns the metrics of MegatronModel.accumulate, and "padding_share" of the positions that were computed.
        """
        return self._accumulate(samples, Objective(loss, metrics), together)[0]

    def accumulate_with_logprobs(
        self, samples: Experience, loss: TokenLoss, metrics: Sequence[str]
    ) -> tuple[dict[str, float], Floats, float]:
        """As `accumulate` and, from before the update, as `logprobs`, in the same pass."""
        metrics_found, column, entropy = self._accumulate(samples, Objective(loss, metrics, keep_columns=True))
        assert column is not None
        return metrics_found, column, entropy

    def shards(self, samples: Experience, together: int = 1) -> list[Shard]:
        """The experience of each data-parallel rank, as micro-batches; a pipeline gets short ones first and last.

        Args:
            together: see accumulate.
        """
        sizes = self.description.parallel
        multiple = sizes.tensor if sizes.sequence else 1
        plan = micro_batches(
            samples.lengths.tolist(),
            self._batching,
            ranks=sizes.data,
            length_multiple=multiple,
            together=together,
            count_multiple=sizes.pipeline if sizes.virtual_pipeline > 1 else 1,
        )
        shards = [Shard.cut(samples, rank_plan, multiple, packed=self._batching.packed) for rank_plan in plan]
        if sizes.pipeline == 1 or sizes.virtual_pipeline > 1:
            return shards
        orders = [rising_then_falling(shard.micro_batch_positions) for shard in shards]
        return [
            Shard.cut(samples, [rank_plan[place] for place in order], multiple, packed=self._batching.packed)
            for rank_plan, order in zip(plan, orders, strict=True)
        ]

    def gathered(
        self, samples: Experience, shards: Sequence[Shard], answers: Sequence[tuple[dict[str, float], Any]]
    ) -> tuple[dict[str, float], Floats | None, float]:
        """A pass's metrics, and its columns and mean entropy if the ranks kept them."""
        padding = 1.0 - sum(one.inputs for one in shards) / sum(one.positions for one in shards)
        columns = [found for _, found in answers]
        metrics = answers[0][0] | {"padding_share": padding}
        if not any(columns):
            return metrics, None, 0.0
        column, entropy = self._placed(samples, shards, columns, "update")
        return metrics, column, entropy / max(len(column), 1)

    def _accumulate(
        self, samples: Experience, objective: Objective, together: int = 1
    ) -> tuple[dict[str, float], Floats | None, float]:
        shards = self.shards(samples, together)
        given = (objective.loss, objective.metrics, objective.keep_columns)
        return self.gathered(samples, shards, self._scatter("accumulate", shards, *given, phase="update"))

    def step(self) -> dict[str, float]:
        """One optimizer step with the accumulated gradients; see MegatronModel.step for the metrics returned."""
        return self._call("step", phase="update")[0]

    def offload(self) -> None:
        """Move weights and optimizer to host memory; gradients are dropped."""
        self._call("offload", phase="offload")

    def onload(self) -> None:
        """Move what `offload` moved back to the device."""
        self._call("onload", phase="onload")

    def take_spans(self) -> list[list[Span]]:
        """What each rank spent its time on since the last call, for all of its models."""
        return self._workers.call("take_spans", phase="update")

    # Checkpoints

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must have in common with this model to be loaded (precision and shape), as JSON."""
        return self._call("identity", phase="checkpoint", ranks=[0])[0]

    def start_save(self, directory: Path, background: bool) -> None:
        """Write a distributed checkpoint into an existing empty directory; `saved` gives the result.

        Args:
            background: return when every rank has copied its part to host memory.
        """
        self._call("start_save", directory, background, phase="checkpoint")

    def saved(self) -> dict[str, FileSum] | None:
        """The files, by name, of the save that was started last; None while a rank is still writing.

        Raises:
            CheckpointError: a rank could not write; files may remain, and the model is unchanged.
        """
        parts = self._call("saved", phase="checkpoint")
        if any(part is None for part in parts):
            return None
        failure = next((part.failure for part in parts if part.failure is not None), None)
        if failure is not None:
            raise CheckpointError(failure)
        return {name: file_sum for part in parts for name, file_sum in part.files.items()}

    def first_damage(self, directory: Path, files: Mapping[str, FileSum]) -> str | None:
        """A sentence about the first damaged file of a distributed checkpoint; None if all are intact.

        Ranks read in parallel; files are dealt out by falling size so that each rank reads about as much.
        """
        names = sorted(files, key=lambda name: files[name].size, reverse=True)
        ranks = range(self._workers.size)
        arguments = [(directory, {name: files[name] for name in names[rank :: len(ranks)]}) for rank in ranks]
        found = self._workers.scatter("verify", arguments, "load checkpoint")
        return next((damage for damage in found if damage is not None), None)

    def load(self, directory: Path) -> bool:
        """Load a distributed checkpoint.

        Returns whether random states were restored, which takes the parallel sizes of the checkpoint.
        """
        return all(self._call("load", directory, phase="load checkpoint"))

    # Resharding

    def senders(self) -> dict[int, list[int]]:
        """Map each pipeline stage to the ranks, in tensor-parallel order, of the replica that provides the weights.

        The first rank of each stage sends; the others only take part in the gather.
        """
        stages: dict[int, list[int]] = {}
        for rank, position in enumerate(self.positions):
            if position.dp == 0:
                stages.setdefault(position.pp, []).append(rank)
        return stages

    def weight_names(self, rank: int, target: WeightTarget) -> list[str]:
        """Names of the tensors of a rank's pipeline stage, or of the draft that it holds."""
        return self._call("weight_names", target, phase="resharding plan", ranks=[rank])[0]

    def connect(self, rank: int, stream: str, address: Any, owner: int) -> Call:
        """Start creating a rank's sending end of a transport."""
        return self._workers.start(rank, "connect", stream, address, owner)

    def send_weights(self, rank: int, stream: str, buckets: Sequence[Bucket], target: WeightTarget) -> Call:
        """Start sending a rank's part of these buckets; the call of the sending rank returns their checksums."""
        return self._workers.start(rank, "send_weights", self.description.name, stream, buckets, target)

    def _call(self, method: str, *args: Any, phase: str, ranks: Sequence[int] | None = None) -> list[Any]:
        return self._workers.call(method, self.description.name, *args, phase=phase, ranks=ranks)

    def _scatter(self, method: str, shards: Sequence[Shard], *args: Any, phase: str) -> list[Any]:
        """Start a call on every worker with the shard of its data-parallel rank."""
        shared = [self._workers.share(shard) for shard in shards]
        arguments = [(self.description.name, shared[position.dp], *args) for position in self.positions]
        return self._workers.scatter(method, arguments, phase)
