"""One Megatron model on one rank: log-probs or values, training, offloading and checkpoints as plain methods."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import rlhfspec_mega.megatron.quick_start  # noqa: F401
from rlhfspec_mega.megatron import checkpoint
from rlhfspec_mega.megatron.build import build_chunks
from rlhfspec_mega.megatron.checkpoint_files import SavedPart
from rlhfspec_mega.megatron.checkpoint_staging import StagedState, Staging
from rlhfspec_mega.megatron.cuda_shim import cuda_means_cpu
from rlhfspec_mega.megatron.description import ModelDescription
from rlhfspec_mega.megatron.gradient_pass import GradientPass
from rlhfspec_mega.megatron.groups import make_groups, ranks_in
from rlhfspec_mega.megatron.optimizer import build_optimizer, build_scheduler
from rlhfspec_mega.megatron.readout import Columns, token_logprobs, token_values
from rlhfspec_mega.megatron.residence import to_device, to_host
from rlhfspec_mega.megatron.saving_groups import SavingGroups
from rlhfspec_mega.megatron.step import accumulate_gradients, compute_columns, reduce_metrics
from rlhfspec_mega.megatron.weights import load_parameters, tensors_for
from rlhfspec_mega.planning.placement import Residency
from rlhfspec_mega.rl.microbatch import MicroBatch, TokenLoss

Method = TypeVar("Method", bound=Callable[..., Any])


def on_megatron(method: Method) -> Method:
    """Enter the CUDA shim around a method: its function mode is per thread, and callers may use any thread."""

    @functools.wraps(method)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with cuda_means_cpu():
            return method(*args, **kwargs)

    return inside  # type: ignore[return-value]


class MegatronModel:
    """A model of any parallel sizes; its methods are collective over its ranks.

    Args:
        ranks: global ranks that hold the model, ascending; this process is one of them.
        call_timeout: longest wait within a collective.

    Attributes:
        groups, position: process groups of the model, and this rank's coordinates.
        chunks: model chunks of this pipeline rank.
        saving_groups: for writing checkpoints; only of a model that learns.
    """

    @on_megatron
    def __init__(
        self, description: ModelDescription, ranks: Sequence[int], device: torch.device, call_timeout: float
    ) -> None:
        logging.getLogger("megatron").setLevel(logging.ERROR)
        self.description, self.shape, self.device = description, description.shape, device
        self.call_timeout = call_timeout
        self.groups = make_groups(description.parallel, ranks, timedelta(seconds=call_timeout))
        self.position = ranks_in(self.groups)
        self.chunks = build_chunks(description, self.groups, device)
        self._read = (
            token_values
            if self.shape.value_head
            else functools.partial(token_logprobs, settings=description.logits, groups=self.groups)
        )
        self._unread = description.checkpoint
        if description.learning is not None:
            self.optimizer = build_optimizer(
                description.learning.optimizer, self.chunks, description.dtype, self.groups
            )
            self.scheduler = build_scheduler(
                description.learning.optimizer, self.optimizer, description.learning.total_updates
            )
            self.saving_groups = SavingGroups(ranks, dist.get_process_group_ranks(self.groups.dp_cp))
            self._staging = Staging(self.chunks, self.optimizer, self.scheduler, self.groups)
        self._rest()

    @on_megatron
    def load_weights(self, path: Path) -> None:
        """Load a Hugging Face directory; a value head that it does not have begins anew.

        Raises UserError if tensors are missing or the shape differs.
        """
        optimizer = self.optimizer if self.description.learning else None
        load_parameters(self.chunks, self.shape, self.groups, tensors_for(self.shape, path), optimizer)
        self._rest()

    @on_megatron
    def load_distributed(self, directory: Path) -> None:
        """Load the weights of a Megatron distributed checkpoint, whatever ranks wrote it."""
        checkpoint.load_weights(directory, self.chunks, self.groups)
        self._rest()

    @on_megatron
    def columns(self, batches: Sequence[MicroBatch]) -> Columns | None:
        """Log-probs and the sum of entropies, or the values of a model with a value head (step.compute_columns).

        One rank of each data-parallel replica returns it, the others return None.
        """
        if self._unread is not None:
            self.load_weights(self._unread)
            self._unread = None
        if self.description.rests is Residency.HOST:
            self.onload()
        found = compute_columns(self.chunks, self.groups, batches, self._read)
        self._rest()
        return found if self.position.tp == 0 else None

    @on_megatron
    def accumulate(
        self, batches: Sequence[MicroBatch], token_loss: TokenLoss, metrics: Sequence[str], keep_columns: bool = False
    ) -> tuple[dict[str, float], Columns | None]:
        """Accumulate gradients of a mini-batch.

        Returns `metrics` and "loss", averaged over all loss tokens, the same on every rank; and with `keep_columns`
        what `columns` would, from the same forward pass.
        """
        gradients = self.gradient_pass(batches, token_loss, metrics, keep_columns)
        return self.pass_result(gradients, metrics, accumulate_gradients(gradients, self.chunks))

    def gradient_pass(
        self, batches: Sequence[MicroBatch], token_loss: TokenLoss, metrics: Sequence[str], keep_columns: bool
    ) -> GradientPass:
        """A pass over a mini-batch that begins with gradients of zero, for a schedule to run."""
        return GradientPass(self.chunks, self.groups, batches, self._read, token_loss, metrics, keep_columns)

    def pass_result(
        self, gradients: GradientPass, metrics: Sequence[str], columns: Columns | None
    ) -> tuple[dict[str, float], Columns | None]:
        """What `accumulate` returns, of a pass that has ended; collective."""
        return reduce_metrics(gradients.sums, metrics, self.groups), columns if self.position.tp == 0 else None

    @on_megatron
    def step(self) -> dict[str, float]:
        """Clip the accumulated gradient and take one optimizer step; the learning-rate schedule advances in any case.

        Megatron looks for gradients that are not finite only when it scales losses, as for fp16, so the norm tells.

        Returns:
            "grad_norm" (before clipping), "lr" and "skipped_updates": 1 when the gradient was not finite and weights
            and optimizer were left as they were, else 0.
        """
        self.scheduler.step(1)
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())  # over all ranks, so they agree
        finite = math.isfinite(norm)
        if finite:
            self.optimizer.step()
        return {"grad_norm": norm, "lr": learning_rate, "skipped_updates": 0.0 if finite else 1.0}

    @on_megatron
    def offload(self) -> None:
        """Move weights and optimizer to host memory and drop gradients; nothing moves on a CPU."""
        to_host(self.chunks, self.optimizer if self.description.learning else None, self.device)

    @on_megatron
    def onload(self) -> None:
        """Move what `offload` moved back to the device."""
        to_device(self.chunks, self.optimizer if self.description.learning else None, self.device)

    def _rest(self) -> None:
        if self.description.rests is Residency.HOST:
            self.offload()

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must have in common with this model to be loaded: precision and shape."""
        return {"dtype": self.description.dtype} | self.shape.identity()

    @on_megatron
    def stage(self, copy: bool) -> StagedState:
        """This rank's part of a distributed checkpoint (see Staging.stage); the one before must have been written."""
        if self.saving_groups.renew_if_closed(self.groups.intra_dist_opt, self.device):
            self._staging.validated = False  # ranks may have seen different ends of the save that failed
        return self._staging.stage(copy, self.saving_groups.data)

    def write(self, staged: StagedState, directory: Path) -> SavedPart:
        """Write what `stage` returned into an existing empty directory; one at a time, in any thread.

        A failure to write is returned and not raised: the model is unchanged and the run may go on.
        """
        part = checkpoint.save(staged, directory, self.saving_groups)
        if part.failure is None:
            self._staging.validated = True
        return part

    @on_megatron
    def load(self, directory: Path) -> bool:
        """Read a distributed checkpoint written under any parallel sizes.

        Returns whether random states were restored.
        """
        return checkpoint.load(directory, self.chunks, self.optimizer, self.scheduler, self.groups)
