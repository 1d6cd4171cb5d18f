"""Passes over micro-batches through Megatron's pipeline schedule: log-probabilities, values, or gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.utils import is_pp_last_stage
from megatron.core.process_groups_config import ProcessGroupCollection

from rlhfspec_mega.megatron.build import unwrap
from rlhfspec_mega.megatron.gradient_pass import GradientPass
from rlhfspec_mega.megatron.readout import Columns, Readout, joined, model_output, of_responses
from rlhfspec_mega.rl.microbatch import MicroBatch, same_shape


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
            forward_step_func=partial(model_output, finish=finish),
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


def compute_columns(
    chunks: list[Any], groups: ProcessGroupCollection, batches: Sequence[MicroBatch], read: Readout
) -> Columns | None:
    """Forward-only log-probs or values, on the last pipeline stage; None on the others."""

    def finish(batch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        found = of_responses(read(output, batch), batch)
        return output.new_zeros(()), torch.zeros((), dtype=torch.int, device=output.device), found

    with torch.no_grad():
        stored = _run(chunks, groups, batches, finish, forward_only=True)
    return joined(stored) if is_pp_last_stage(groups.pp) else None


def accumulate_gradients(gradients: GradientPass, chunks: list[Any]) -> Columns | None:
    """Forward and backward over all micro-batches of a pass, by Megatron's schedule; see GradientPass.columns."""
    stored = _run(chunks, gradients.groups, gradients.batches, gradients.finish, forward_only=False)
    return gradients.columns(stored)


def reduce_metrics(sums: torch.Tensor, names: Sequence[str], groups: ProcessGroupCollection) -> dict[str, float]:
    """Means over the loss tokens of all ranks, the same on every rank; `sums` is GradientPass.sums."""
    if groups.tp.rank() != 0:
        sums.zero_()  # each TP rank holds the same numbers: count them once
    dist.all_reduce(sums, group=groups.intra_dist_opt)
    count, *rest = sums.tolist()
    means = {name: value / max(count, 1.0) for name, value in zip(["loss", *names], rest, strict=True)}
    return means | {"loss_tokens": count}
