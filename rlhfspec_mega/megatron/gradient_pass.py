"""The forward and backward passes of one model over a mini-batch, for whatever orders them: losses, sums, tasks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel.schedules import backward_step, forward_step
from megatron.core.pipeline_parallel.utils import is_pp_last_stage
from megatron.core.process_groups_config import ProcessGroupCollection

from rlhfspec_mega.megatron.build import unwrap
from rlhfspec_mega.megatron.readout import Columns, Readout, joined, model_output, of_responses
from rlhfspec_mega.rl.microbatch import MicroBatch, TokenLoss

# From the forward of a micro-batch to its backward: the stage's input (None on the first one) and its output.
Live = tuple[torch.Tensor | None, torch.Tensor]


class GradientPass:
    """Gradients of a mini-batch, accumulated task by task on this rank.

    The loss is sum(weight * token loss) / number of loss tokens of all DP ranks, whatever the micro-batches and ranks.

    Args:
        names: names of the loss's metrics.
        keep_columns: whether to keep also what `compute_columns` would return.

    Attributes:
        sums: float64 sums over this rank's loss tokens: their number, the loss, and the metrics; zeros on all stages
            but the last. No value is read from the device for them.
    """

    def __init__(
        self,
        chunks: list[Any],
        groups: ProcessGroupCollection,
        batches: Sequence[MicroBatch],
        read: Readout,
        token_loss: TokenLoss,
        names: Sequence[str],
        keep_columns: bool = False,
    ) -> None:
        for chunk in chunks:
            chunk.zero_grad_buffer()
            unwrap(chunk).config.finalize_model_grads_func = finalize_model_grads
        self.batches, self.groups, self.config = batches, groups, unwrap(chunks[0]).config
        self.device = next(chunks[0].parameters()).device
        self.sums = torch.zeros(2 + len(names), dtype=torch.float64, device=self.device)
        self._chunks, self._read, self._token_loss, self._names = chunks, read, token_loss, names
        self._keep_columns = keep_columns
        self._tokens = torch.zeros([], dtype=torch.int, device=self.device)
        self._live: dict[int, Live] = {}
        self._stored: dict[int, Any] = {}

    def finish(self, batch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """The loss of a micro-batch from the last stage's output, as Megatron's schedules want it."""
        weights = batch.weights.to(self.device)
        found = self._read(output, batch)
        losses, metrics = self._token_loss(*found, batch)
        loss = (losses * weights).sum()
        count = (weights > 0).sum()
        counted = (weights > 0).to(losses.dtype)
        values = [count, loss.detach(), *((metrics[name].detach() * counted).sum() for name in self._names)]
        self.sums.add_(torch.stack([value.double() for value in values]))
        kept = of_responses([column.detach() for column in found], batch) if self._keep_columns else None
        return loss, count.to(torch.int), kept

    def columns(self, stored: Sequence[Any]) -> Columns | None:
        """What was kept of all micro-batches, on the last stage; `stored`: what `finish` gave of each."""
        return joined(stored) if self._keep_columns and is_pp_last_stage(self.groups.pp) else None

    # Task by task

    @property
    def last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return is_pp_last_stage(self.groups.pp)

    def buffer(self, micro_batch: int) -> torch.Tensor:
        """An empty tensor of the shape that stages exchange of a micro-batch: [length, rows, hidden]."""
        rows, length = self.batches[micro_batch].inputs.shape
        if self.config.sequence_parallel:
            length //= self.groups.tp.size()
        shape = (length, rows, self.config.hidden_size)
        return torch.empty(shape, dtype=self.config.pipeline_dtype, device=self.device)

    def forward(self, micro_batch: int, given: torch.Tensor | None) -> torch.Tensor:
        """Megatron's forward step; returns what the next stage is to be sent, on the last one the loss."""
        if given is not None:
            given.requires_grad_()
        stored: list[Any] = []
        output, tokens = forward_step(
            partial(model_output, finish=self.finish),
            iter([self.batches[micro_batch]]),
            self._chunks[0],
            len(self.batches),
            given,
            stored,
            self.config,
            self.groups.cp.size(),
            current_microbatch=micro_batch,
            is_last_stage=self.last_stage,
        )
        self._tokens += tokens
        self._stored[micro_batch] = stored[0] if stored else None
        self._live[micro_batch] = given, output
        return output

    def backward(self, micro_batch: int, given: torch.Tensor | None) -> torch.Tensor | None:
        """Megatron's backward step; returns the gradient for the stage before, None on the first one."""
        before, output = self._live.pop(micro_batch)
        return backward_step(before, output, given, ModelType.encoder_or_decoder, self.config)

    def end(self) -> Columns | None:
        """Finish the gradients of all ranks after the last backward; see `columns` for what is returned."""
        finalize_model_grads(self._chunks, self._tokens, pg_collection=self.groups)
        return self.columns([self._stored[place] for place in range(len(self.batches))])
