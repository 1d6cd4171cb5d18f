"""One rank of the actor: Megatron model, optimizer and schedule behind a few plain methods."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

import rlhfspec_mega.actor.quick_start  # noqa: F401
from rlhfspec_mega.actor import checkpoint
from rlhfspec_mega.actor.checkpoint_files import FileSum, SavedPart, first_damage
from rlhfspec_mega.actor.checkpoint_writer import WriteFailed
from rlhfspec_mega.actor.cuda_shim import cuda_means_cpu
from rlhfspec_mega.actor.initialize import initialize
from rlhfspec_mega.actor.model import build_model
from rlhfspec_mega.actor.optimizer import build_optimizer, build_scheduler
from rlhfspec_mega.actor.random_state import seed_generators
from rlhfspec_mega.actor.reference import ReferenceWeights
from rlhfspec_mega.actor.rendezvous import ParallelRanks, Rendezvous
from rlhfspec_mega.actor.step import LogitSettings, accumulate_gradients, compute_logprobs, reduce_metrics
from rlhfspec_mega.actor.weights import load_parameters
from rlhfspec_mega.algorithm.microbatch import MicroBatch, TokenLoss
from rlhfspec_mega.config.schema import ActorConfig
from rlhfspec_mega.models.hf_directory import HfWeights
from rlhfspec_mega.models.shape import ModelShape

Method = TypeVar("Method", bound=Callable[..., Any])


def on_megatron(method: Method) -> Method:
    """Enter the CUDA shim around a method: its function mode is per thread, and callers may use any thread."""

    @functools.wraps(method)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with cuda_means_cpu():
            return method(*args, **kwargs)

    return inside  # type: ignore[return-value]


class Actor:
    """The policy on one rank.

    Args:
        temperature: sampling temperature; log-probs are those of logits / T.
        total_updates: optimizer steps of the run, for the learning-rate schedule.
    """

    @on_megatron
    def __init__(
        self,
        shape: ModelShape,
        config: ActorConfig,
        rendezvous: Rendezvous,
        *,
        device: str,
        seed: int,
        temperature: float,
        total_updates: int,
    ) -> None:
        logging.getLogger("megatron").setLevel(logging.ERROR)
        self.shape, self.config = shape, config
        self.device = torch.device("cuda:0" if device == "cuda" else device)
        self.ranks: ParallelRanks = initialize(rendezvous, config, self.device, seed)
        self.chunks = build_model(shape, config, self.device)
        seed_generators(seed, self.ranks)  # after initial weights were drawn, which no run uses
        self.optimizer = build_optimizer(config.optimizer, self.chunks, config.dtype)
        self.scheduler = build_scheduler(config.optimizer, self.optimizer, total_updates)
        self._logits = LogitSettings(shape.vocab_size, temperature or 1.0, config.logprob_chunk)
        self._reference: ReferenceWeights | None = None

    @on_megatron
    def load_weights(self, path: Path) -> None:
        """Load a Hugging Face directory. Raises UserError when tensors are missing or the shape differs."""
        load_parameters(self.chunks, self.shape, HfWeights(path).lazy, self.optimizer)

    def freeze_reference(self) -> None:
        """Keep the weights of now, in host memory, as the reference."""
        self._reference = ReferenceWeights(self.chunks)

    @on_megatron
    def logprobs(
        self, batches: Sequence[MicroBatch], use_reference: bool
    ) -> dict[int, tuple[list[float], float]] | None:
        """Log-probs and summed entropy per sequence index; one copy per data-parallel rank, None elsewhere."""
        weights = self._reference.swapped_in() if use_reference and self._reference else nullcontext()
        with weights:
            found = compute_logprobs(self.chunks, batches, self._logits)
        return found if self.ranks.tp == 0 else None

    @on_megatron
    def update(self, batches: Sequence[MicroBatch], token_loss: TokenLoss, metrics: Sequence[str]) -> dict[str, float]:
        """Gradients, clipping, one optimizer step; metrics averaged over all loss tokens, the same on every rank.

        Besides `metrics` and "loss": "gradient_norm" (before clipping), "learning_rate" and "skipped" (1 when the
        gradient was not finite and the step was left out).
        """
        stored = accumulate_gradients(self.chunks, batches, self._logits, token_loss)
        self.scheduler.step(1)
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        succeeded, norm, _ = self.optimizer.step()
        result = reduce_metrics(stored, metrics)
        return result | {
            "gradient_norm": float(norm or 0.0),
            "learning_rate": learning_rate,
            "skipped": 0.0 if succeeded else 1.0,
        }

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must have in common with this actor to be loaded: precision and the model's shape."""
        return {"dtype": self.config.dtype} | asdict(self.shape)

    @on_megatron
    def save(self, directory: Path) -> SavedPart:
        """Write this rank's part of a distributed checkpoint into an existing empty directory.

        A failure to write is returned, the same on all ranks, which stay as they were: it need not end the run.
        """
        arguments = (directory, self.chunks, self.optimizer, self.scheduler, self.ranks)
        try:
            return SavedPart(checkpoint.save(*arguments), None)
        except WriteFailed as error:
            return SavedPart({}, str(error))

    def verify(self, directory: Path, files: Mapping[str, FileSum]) -> str | None:
        """What is wrong with the first of these files that is damaged; None when all are as they were written."""
        return first_damage(directory, files)

    @on_megatron
    def load(self, directory: Path) -> bool:
        """Read a distributed checkpoint written under any parallel sizes; whether the random state came with it."""
        return checkpoint.load(directory, self.chunks, self.optimizer, self.scheduler, self.ranks)
