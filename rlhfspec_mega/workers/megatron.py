"""The worker process of one Megatron rank, for any number of models."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from rlhfspec_mega.draft.refresh import DraftLearning, RefreshReport
from rlhfspec_mega.megatron.checkpoint_files import FileSum, SavedPart, first_damage
from rlhfspec_mega.megatron.description import ModelDescription, ParallelRanks
from rlhfspec_mega.megatron.draft import ActorDraft
from rlhfspec_mega.megatron.fused_models import FusedModels
from rlhfspec_mega.megatron.groups import positions
from rlhfspec_mega.megatron.model import MegatronModel
from rlhfspec_mega.megatron.process import join, seed_megatron, set_deterministic
from rlhfspec_mega.megatron.random_state import seed_generators
from rlhfspec_mega.megatron.rendezvous import Rendezvous
from rlhfspec_mega.observe.spans import SpanRecorder
from rlhfspec_mega.planning.pipeline.rank_task import RankTask, TaskTime
from rlhfspec_mega.resharding.buckets import Bucket
from rlhfspec_mega.resharding.export import Senders, WeightExporter, send_tensors
from rlhfspec_mega.rl.microbatch import Objective, Shard, TokenLoss
from rlhfspec_mega.types import Span, WeightTarget


class MegatronWorker:
    """Holds Megatron models by name, each spread over all processes of the group.

    Beside the first model a draft may learn, and its weights may be sent.

    Args:
        device: "cpu" or "cuda".
        deterministic: refuse operations whose result depends on timing (process.set_deterministic).
        launch: how many times these processes have been started before; see Rendezvous.again.
    """

    def __init__(
        self,
        models: Sequence[ModelDescription],
        rendezvous: Rendezvous,
        device: str,
        seed: int,
        deterministic: bool = False,
        launch: int | None = None,
    ) -> None:
        set_deterministic(deterministic)
        place = torch.device("cuda:0" if device == "cuda" else device)
        join(rendezvous if launch is None else rendezvous.again(launch), place)
        position = positions(models[0].parallel)[rendezvous.rank]
        seed_megatron(seed, position)
        ranks = range(rendezvous.world_size)
        self._models = {one.name: MegatronModel(one, ranks, place, rendezvous.call_timeout) for one in models}
        self._fused, self._fused_passes = FusedModels(self._models), 0
        seed_generators(seed, position)  # after the random initial weights were drawn: checkpoints replace them
        self._exporters: dict[str, WeightExporter] = {}
        self._senders = Senders()
        self._draft: ActorDraft | None = None
        self._spans = SpanRecorder()
        self._saver = ThreadPoolExecutor(1, "checkpoint")
        self._saving: dict[str, Future[SavedPart]] = {}
        gc.freeze()  # Megatron collects garbage in every save, which then looks at the objects made since

    # Models

    def grid_position(self, model: str) -> ParallelRanks:
        """The rank's position in the TP x PP x DP grid of a model."""
        return self._models[model].position

    def load_weights(self, model: str, path: Path) -> None:
        """See MegatronModel.load_weights."""
        self._models[model].load_weights(path)

    def columns(self, model: str, shard: Shard, refresh_follows: bool = False) -> tuple[NDArray, float] | None:
        """Log-probs or values of the shard's response tokens, and the sum of entropies; see MegatronModel.columns.

        A draft learns from the pass if the model is its own (see ActorDraft.learning_from).
        """
        batches = shard.batches()
        one = self._models[model]
        what = "values" if one.shape.value_head else "log-probs"
        with self._spans.measure(f"{model} {what}", micro_batches=len(batches)):
            if self._draft is None or self._draft.model is not one:
                found = one.columns(batches)
            else:
                with self._draft.learning_from(batches, refresh_follows):
                    found = one.columns(batches)
        return (found[0].numpy(), found[1]) if found else None

    def score(self, shards: Mapping[str, Shard]) -> tuple[dict[str, NDArray], Span] | None:
        """Frozen models' log-probs or values of the response tokens of their shards, and the seconds that this took."""
        found = {model: self.columns(model, shard) for model, shard in shards.items()}
        spans = self.take_spans()
        span = Span("score", spans[0].start, sum(one.seconds for one in spans), {})
        columns = {model: one[0] for model, one in found.items() if one}
        return (columns, span) if columns else None

    def accumulate(
        self, model: str, shard: Shard, loss: TokenLoss, metrics: Sequence[str], keep_columns: bool
    ) -> tuple[dict[str, float], tuple[NDArray, float] | None]:
        """See MegatronModel.accumulate."""
        batches = shard.batches()
        with self._spans.measure(f"{model} gradients", micro_batches=len(batches)):
            means, found = self._models[model].accumulate(batches, loss, metrics, keep_columns)
        return means, (found[0].numpy(), found[1]) if found else None

    def accumulate_fused(
        self, tasks: Sequence[RankTask], objectives: Mapping[str, Objective], *shards: Shard
    ) -> tuple[dict[str, Any], list[TaskTime]]:
        """Accumulate two models' gradients in one pass; by model what `accumulate` returns, and the tasks' times.

        Args:
            shards: in the order of `objectives`.
        """
        batches = {model: shard.batches() for model, shard in zip(objectives, shards, strict=True)}
        found, times = self._fused.accumulate(batches, objectives, tasks)
        self._fused_passes += 1
        for one in times:
            self._spans.add(
                f"{one.task.model} {'backward' if one.task.backward else 'forward'}",
                one.start,
                one.start + one.seconds,
                micro_batch=str(one.task.micro_batch),
                update=str(self._fused_passes),
            )
        return {
            model: (means, (columns[0].numpy(), columns[1]) if columns else None)
            for model, (means, columns) in found.items()
        }, times

    def step(self, model: str) -> dict[str, float]:
        """See MegatronModel.step."""
        with self._spans.measure(f"{model} optimizer step"):
            return self._models[model].step()

    def offload(self, model: str) -> None:
        """See MegatronModel.offload."""
        self._models[model].offload()

    def onload(self, model: str) -> None:
        """See MegatronModel.onload."""
        self._models[model].onload()

    def take_spans(self) -> list[Span]:
        """What this rank spent its time on since the last call, for the timeline."""
        return self._spans.take()

    # Checkpoints

    def identity(self, model: str) -> dict[str, Any]:
        """See MegatronModel.identity."""
        return self._models[model].identity()

    def start_save(self, model: str, directory: Path, background: bool) -> None:
        """Save a model, and its draft, into an existing empty directory; `saved` gives the result.

        Args:
            background: return when everything is copied to host memory; a thread writes it.
        """
        one = self._models[model]
        draft = self._draft if self._draft is not None and self._draft.model is one else None
        of_model, of_draft = one.stage(background), draft.stage(background) if draft else None

        def write() -> SavedPart:
            part = one.write(of_model, directory)
            if draft is None or part.failure is not None:
                return part
            beside = draft.write(of_draft, directory)
            return beside if beside.failure is not None else SavedPart(part.files | beside.files, None)

        self._saving[model] = self._saver.submit(write)
        if not background:
            self._saving[model].exception()  # waits for the end

    def saved(self, model: str) -> SavedPart | None:
        """This rank's part of the model's save that was started last; None while it is being written."""
        saving = self._saving.get(model)
        return saving.result() if saving is not None and saving.done() else None

    def load(self, model: str, directory: Path) -> bool:
        """See MegatronModel.load; the draft of this model is loaded with it."""
        same_grid = self._models[model].load(directory)
        if self._draft is not None and self._draft.model is self._models[model]:
            self._draft.load(directory)
        return same_grid

    def verify(self, directory: Path, files: Mapping[str, FileSum]) -> str | None:
        """A sentence about the first damaged file among these; None if all are intact."""
        return first_damage(directory, files)

    # The draft

    def start_draft(self, model: str, path: Path, learning: DraftLearning | None) -> None:
        """Load a draft of this model from its directory; it learns from now on if `learning` is given."""
        self._draft = ActorDraft(self._models[model], path, learning)

    def refresh_draft(self, steps: int | None, seconds: float | None) -> RefreshReport | None:
        """Train the draft for a number of steps or of seconds; returns the report on the draft's rank."""
        assert self._draft is not None
        with self._spans.measure("draft refresh"):
            return self._draft.refresh(steps, seconds)

    # Resharding

    def weight_names(self, model: str, target: WeightTarget) -> list[str]:
        """Names of the tensors of this rank's pipeline stage, or of the draft that this rank holds."""
        if target is WeightTarget.ACTOR:
            return self._exporter(model).names()
        return list(self._draft.weights()) if self._draft is not None else []

    def connect(self, stream: str, address: Any, owner: int) -> None:
        """Create the sending end of a transport for `stream`; replaces an earlier one."""
        self._senders.connect(stream, address, owner)

    def send_weights(
        self, model: str, stream: str, buckets: Sequence[Bucket], target: WeightTarget = WeightTarget.ACTOR
    ) -> dict[int, int]:
        """Send this stage's buckets; returns their checksums on the stage's first tensor-parallel rank."""
        sender = self._senders.get(stream)
        with self._spans.measure("send weights", target=target.value):
            if target is WeightTarget.ACTOR:
                return self._exporter(model).send(buckets, sender)
            assert self._draft is not None
            return send_tensors(self._draft.weights(), buckets, sender) if sender is not None else {}

    def _exporter(self, model: str) -> WeightExporter:
        if model not in self._exporters:
            self._exporters[model] = WeightExporter(self._models[model])
        return self._exporters[model]
