"""One pass over micro-batches through Megatron's pipeline schedule: log-probabilities, or gradients and an update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from rlhfspec_mega.actor.model import unwrap
from rlhfspec_mega.actor.vocab_parallel import vocab_parallel_logprobs
from rlhfspec_mega.algorithm.microbatch import MicroBatch, TokenLoss, same_shape


@dataclass(frozen=True)
class LogitSettings:
    """How logits become log-probabilities. `temperature` is the sampling temperature (1 for greedy)."""

    vocab_size: int
    temperature: float
    chunk: int


def token_logprobs(
    logits: torch.Tensor, batch: MicroBatch, settings: LogitSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, entropy) [rows, length] of the micro-batch's targets."""
    return vocab_parallel_logprobs(
        logits,
        batch.targets.to(logits.device),
        temperature=settings.temperature,
        vocab_size=settings.vocab_size,
        chunk=settings.chunk,
        group=parallel_state.get_tensor_model_parallel_group(),
    )


def _forward(batches: Iterator[MicroBatch], model: Any, finish: Callable[..., Any]) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    device = next(model.parameters()).device
    inputs = batch.inputs.to(device)
    positions = torch.arange(inputs.shape[1], device=device).expand_as(inputs)
    # Float16Module would upcast all logits at once; the log-probs do it chunk by chunk.
    keep = {"fp32_output": False} if unwrap(model).config.bf16 else {}
    output = model(input_ids=inputs, position_ids=positions, attention_mask=None, **keep)
    return output, partial(finish, batch)


def _run(chunks: list[Any], batches: Sequence[MicroBatch], finish: Callable[..., Any], forward_only: bool) -> list[Any]:
    """Drive the schedule; what `finish` stored on the last stage, one entry per micro-batch (empty elsewhere)."""
    if len(chunks) > 1:
        batches = same_shape(batches)
    iterators = [iter(batches) for _ in chunks]
    rows, length = batches[0].inputs.shape
    return list(
        get_forward_backward_func()(
            forward_step_func=partial(_forward, finish=finish),
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(batches),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=forward_only,
        )
    )


def compute_logprobs(
    chunks: list[Any], batches: Sequence[MicroBatch], settings: LogitSettings
) -> dict[int, tuple[list[float], float]] | None:
    """Forward-only log-probs of every response token.

    Returns:
        On the last pipeline stage {sequence index: (log-probs of its response, sum of its tokens' entropy)},
        None on the others.
    """

    def finish(batch: MicroBatch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        logprobs, entropy = token_logprobs(logits, batch, settings)
        found = {}
        for row, index in enumerate(batch.indices):
            mask = batch.mask[row].to(logits.device)
            found[index] = (logprobs[row][mask].tolist(), float(entropy[row][mask].sum()))
        return logits.new_zeros(()), torch.zeros((), dtype=torch.int, device=logits.device), found

    with torch.no_grad():
        stored = _run(chunks, batches, finish, forward_only=True)
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return None
    return {index: value for found in stored for index, value in found.items()}


def accumulate_gradients(
    chunks: list[Any], batches: Sequence[MicroBatch], settings: LogitSettings, token_loss: TokenLoss
) -> list[dict[str, float]]:
    """Forward and backward over all micro-batches; gradients end averaged over the loss tokens of all DP ranks.

    The loss is sum(weight * token loss) / number of loss tokens, whatever the split into micro-batches and ranks.

    Returns:
        Per micro-batch the sums over its loss tokens of "loss", "tokens" and of the loss's metrics (last stage only).
    """
    for chunk in chunks:
        chunk.zero_grad_buffer()
        unwrap(chunk).config.finalize_model_grads_func = finalize_model_grads

    def finish(batch: MicroBatch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        logprobs, entropy = token_logprobs(logits, batch, settings)
        device = logits.device
        weight = batch.weight.to(device)
        losses, metrics = token_loss(logprobs, entropy, batch)
        loss = (losses * weight).sum()
        count = (weight > 0).sum()
        counted = (weight > 0).to(losses.dtype)
        stored = {name: float((value.detach() * counted).sum()) for name, value in metrics.items()}
        stored |= {"loss": float(loss.detach()), "tokens": float(count)}
        return loss, count.to(torch.int), stored

    return _run(chunks, batches, finish, forward_only=False)


def reduce_metrics(stored: list[dict[str, float]], names: Sequence[str]) -> dict[str, float]:
    """Means over the loss tokens of all micro-batches and ranks, the same on every rank.

    Args:
        names: metrics to reduce, known on all stages (stages but the last store nothing).
    """
    keys = ["tokens", "loss", *names]
    sums = torch.tensor([sum(entry[key] for entry in stored) for key in keys], dtype=torch.float64)
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        sums.zero_()  # each TP rank holds the same numbers: count them once
    if dist.get_backend() == "nccl":
        sums = sums.cuda()
    dist.all_reduce(sums)
    tokens = max(float(sums[0]), 1.0)
    return {key: float(value) / tokens for key, value in zip(keys[1:], sums[1:], strict=True)} | {
        "loss_tokens": float(sums[0])
    }
