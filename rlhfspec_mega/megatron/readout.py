"""What is read of a model's last stage: log-probs or values of tokens; and how a micro-batch is given to a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from rlhfspec_mega.megatron.build import unwrap
from rlhfspec_mega.megatron.description import LogitSettings
from rlhfspec_mega.megatron.packed_sequences import packed_sequences
from rlhfspec_mega.megatron.vocab_parallel import vocab_parallel_logprobs
from rlhfspec_mega.rl.microbatch import MicroBatch


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


# Of every response token, in the order of micro-batches, rows and tokens: fp32 log-probs or values on the host, and the
# sum of the tokens' entropy, 0 of values.
Columns = tuple[torch.Tensor, float]


def model_output(batches: Iterator[MicroBatch], model: Any, finish: Callable[..., Any]) -> tuple[torch.Tensor, Any]:
    """Output of a stage for the next micro-batch, and what makes its loss of it: Megatron's forward step function."""
    batch = next(batches)
    device = next(model.parameters()).device
    inputs = batch.inputs.to(device)
    positions = torch.arange(inputs.shape[1], device=device).expand_as(inputs)  # rotary embeddings do not read them
    apart = {"packed_seq_params": packed_sequences(batch.parts, device)} if batch.packed else {}
    # Float16Module would upcast all logits at once; the log-probs do it chunk by chunk.
    keep = {"fp32_output": False} if unwrap(model).config.bf16 else {}
    output = model(input_ids=inputs, position_ids=positions, attention_mask=None, **keep, **apart)
    return output, partial(finish, batch)


def of_responses(found: Sequence[torch.Tensor], batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a micro-batch's response tokens: log-probs or values, and the sum of entropies."""
    mask = batch.mask.to(found[0].device)
    column, *entropy = (part[mask] for part in found)
    return column, sum((part.sum(dtype=torch.float64) for part in entropy), torch.zeros((), dtype=torch.float64))


def joined(stored: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Columns:
    """Columns of all micro-batches, from those of each."""
    columns, entropy = zip(*stored, strict=True)
    return torch.cat(columns).cpu(), float(torch.stack(entropy).sum())
