"""Passes over micro-batches through Megatron's pipeline schedule: log-probabilities, values, or gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.utils import is_pp_last_stage
from megatron.core.process_groups_config import ProcessGroupCollection

from rlhfspec_mega.megatron.build import unwrap
from rlhfspec_mega.megatron.description import LogitSettings
from rlhfspec_mega.megatron.packed_sequences import packed_sequences
from rlhfspec_mega.megatron.vocab_parallel import vocab_parallel_logprobs
from rlhfspec_mega.rl.microbatch import MicroBatch, TokenLoss, same_shape


def token_logprobs(
    logits: torch.Tensor, batch: MicroBatch, settings: LogitSettings, groups: ProcessGroupCollection
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, entropy) [rows, length] of the micro-batch's targets."""
    return vocab_parallel_logprobs(
        logits,
        batch.targets.to(logits.device),
        temperature=settings.temperature,
        vocab_size=settings.vocab_size,
        chunk=settings.chunk,
        group=groups.tp,
    )


def token_values(output: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor]:
    """The value of the state before each of the micro-batch's targets, [rows, length] fp32."""
    return (output[..., 0].float(),)


# output of the last stage, micro-batch -> what the losses read of it, tensors [rows, length]: (log-probs, entropy) or
# (values,)
Readout = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, ...]]


def _forward(batches: Iterator[MicroBatch], model: Any, finish: Callable[..., Any]) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    device = next(model.parameters()).device
    inputs = batch.inputs.to(device)
    positions = torch.arange(inputs.shape[1], device=device).expand_as(inputs)  # rotary embeddings do not read them
    apart = {"packed_seq_params": packed_sequences(batch.parts, device)} if batch.packed else {}
    # Float16Module would upcast all logits at once; the log-probs do it chunk by chunk.
    keep = {"fp32_output": False} if unwrap(model).config.bf16 else {}
    output = model(input_ids=inputs, position_ids=positions, attention_mask=None, **keep, **apart)
    return output, partial(finish, batch)


def _run(
    chunks: list[Any],
    groups: ProcessGroupCollection,
    batches: Sequence[MicroBatch],
    finish: Callable[..., Any],
    forward_only: bool,
) -> list[Any]:
    """Run the schedule; returns what `finish` stored on the last stage, one entry per micro-batch ([] elsewhere)."""
    if len(chunks) > 1:
        batches = same_shape(batches)
    iterators = [iter(batches) for _ in chunks]
    rows, length = batches[0].inputs.shape
    config, stages = unwrap(chunks[0]).config, groups.pp.size()
    schedule = get_forward_backward_func(stages, config.virtual_pipeline_model_parallel_size)
    return list(
        schedule(
            forward_step_func=partial(_forward, finish=finish),
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(batches),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=forward_only,
            p2p_communicator=P2PCommunicator(groups.pp, config) if stages > 1 else None,
            pg_collection=groups,
        )
    )


# Of every response token, in the order of micro-batches, rows and tokens: fp32 log-probs or values on the host, and the
# sum of the tokens' entropy, 0 of values.
Columns = tuple[torch.Tensor, float]


def compute_columns(
    chunks: list[Any], groups: ProcessGroupCollection, batches: Sequence[MicroBatch], read: Readout
) -> Columns | None:
    """Forward-only log-probs or values, on the last pipeline stage; None on the others."""

    def finish(batch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        found = _of_responses(read(output, batch), batch)
        return output.new_zeros(()), torch.zeros((), dtype=torch.int, device=output.device), found

    with torch.no_grad():
        stored = _run(chunks, groups, batches, finish, forward_only=True)
    return _joined(stored) if is_pp_last_stage(groups.pp) else None


def _of_responses(found: Sequence[torch.Tensor], batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a micro-batch's response tokens: log-probs or values, and the sum of entropies."""
    mask = batch.mask.to(found[0].device)
    column, *entropy = (part[mask] for part in found)
    return column, sum((part.sum(dtype=torch.float64) for part in entropy), torch.zeros((), dtype=torch.float64))


def _joined(stored: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Columns:
    columns, entropy = zip(*stored, strict=True)
    return torch.cat(columns).cpu(), float(torch.stack(entropy).sum())


def accumulate_gradients(
    chunks: list[Any],
    groups: ProcessGroupCollection,
    batches: Sequence[MicroBatch],
    read: Readout,
    token_loss: TokenLoss,
    names: Sequence[str],
    keep_columns: bool = False,
) -> tuple[torch.Tensor, Columns | None]:
    """Forward and backward over all micro-batches; gradients are averaged over the loss tokens of all DP ranks.

    The loss is sum(weight * token loss) / number of loss tokens, whatever the split into micro-batches and ranks.

    Args:
        names: names of the loss's metrics.
        keep_columns: whether to return also what `compute_columns` would.

    Returns:
        float64 sums over this rank's loss tokens: their number, the loss, and the metrics; zeros on all stages but the
        last. No value is read from the device for them. And the columns, on the last stage, if they are wanted.
    """
    for chunk in chunks:
        chunk.zero_grad_buffer()
        unwrap(chunk).config.finalize_model_grads_func = finalize_model_grads
    device = next(chunks[0].parameters()).device
    sums = torch.zeros(2 + len(names), dtype=torch.float64, device=device)

    def finish(batch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        weights = batch.weights.to(device)
        found = read(output, batch)
        losses, metrics = token_loss(*found, batch)
        loss = (losses * weights).sum()
        count = (weights > 0).sum()
        counted = (weights > 0).to(losses.dtype)
        values = [count, loss.detach(), *((metrics[name].detach() * counted).sum() for name in names)]
        sums.add_(torch.stack([value.double() for value in values]))
        kept = _of_responses([column.detach() for column in found], batch) if keep_columns else None
        return loss, count.to(torch.int), kept

    stored = _run(chunks, groups, batches, finish, forward_only=False)
    return sums, _joined(stored) if keep_columns and is_pp_last_stage(groups.pp) else None


def reduce_metrics(sums: torch.Tensor, names: Sequence[str], groups: ProcessGroupCollection) -> dict[str, float]:
    """Means over the loss tokens of all ranks, the same on every rank; `sums` is the result of accumulate_gradients."""
    if groups.tp.rank() != 0:
        sums.zero_()  # each TP rank holds the same numbers: count them once
    dist.all_reduce(sums, group=groups.intra_dist_opt)
    count, *rest = sums.tolist()
    means = {name: value / max(count, 1.0) for name, value in zip(["loss", *names], rest, strict=True)}
    return means | {"loss_tokens": count}
