"""Hidden states of the actor's own forward pass, gathered on one rank: a draft reads them and learns from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.utils import is_pp_last_stage
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from rlhfspec_mega.draft.examples import Example
from rlhfspec_mega.megatron.build import unwrap
from rlhfspec_mega.rl.microbatch import MicroBatch


def has_draft(groups: ProcessGroupCollection) -> bool:
    """Whether this rank receives the hidden states: the first rank of the last stage of the first replica."""
    return _records(groups) and is_pp_last_stage(groups.pp)


def _records(groups: ProcessGroupCollection) -> bool:
    """Whether this rank is one that records; its tensor-parallel peers hold the same states and do not."""
    return groups.dp.rank() == 0 and groups.tp.rank() == 0


@dataclass(frozen=True)
class Place:
    """A sequence that the draft learns from: its place in its micro-batch, and its first row of recorded states."""

    batch: int
    row: int
    position: int
    tokens: torch.Tensor
    prompt_length: int
    first: int

    @property
    def inputs(self) -> int:
        """Number of tokens that the forward pass reads, and so of hidden states: all but the last one."""
        return len(self.tokens) - 1


def choose(batches: Sequence[MicroBatch], most_tokens: int) -> list[Place]:
    """Choose sequences to record, evenly spread over the step's order; the same on every rank of a replica.

    Args:
        most_tokens: limit for the tokens of all chosen sequences together.
    """
    found: dict[int, tuple[int, int, slice]] = {}
    for number, batch in enumerate(batches):
        for index, (row, position), inputs in zip(batch.indices, batch.places, batch.lengths, strict=True):
            own = slice(position, position + inputs)
            if batch.mask[row, own].any():
                found[index] = number, row, own
    lengths = {index: own.stop - own.start + 1 for index, (_, _, own) in found.items()}
    stride = max(1, -(-sum(lengths.values()) // most_tokens))
    chosen: list[Place] = []
    first = 0
    for index in sorted(found)[::stride]:
        if first + lengths[index] > most_tokens:
            continue
        number, row, own = found[index]
        batch = batches[number]
        tokens = torch.cat((batch.inputs[row, own], batch.targets[row, own.stop - 1 : own.stop]))
        prompt_length = int(batch.mask[row, own].nonzero()[0]) + 1
        chosen.append(Place(number, row, own.start, tokens, prompt_length, first))
        first += lengths[index]
    return chosen


@contextmanager
def recorded_features(
    chunks: Sequence[Any],
    groups: ProcessGroupCollection,
    batches: Sequence[MicroBatch],
    taps: Sequence[int],
    most_tokens: int,
) -> Iterator[list[Example]]:
    """Record one forward-only pass over `batches`, run inside; afterwards the list holds the examples.

    It is filled on one rank (`has_draft`) and stays empty on the others. Collective over the first replica's ranks.
    The last token's rows of features and states are zero: the pass does not compute them, and they predict nothing.

    Args:
        taps: layers (0 is the first) whose outputs make up the features, low to high; one may come twice.
        most_tokens: bound of what is recorded; [most_tokens, (taps + 1) * hidden] values of the actor's precision.
    """
    examples: list[Example] = []
    gathers = unwrap(chunks[0]).config.sequence_parallel
    places = choose(batches, most_tokens) if groups.dp.rank() == 0 and (gathers or _records(groups)) else []
    if not places:
        yield examples
        return
    width = unwrap(chunks[0]).config.hidden_size
    like = next(unwrap(chunks[0]).parameters())
    states = like.new_zeros(places[-1].first + len(places[-1].tokens), (len(taps) + 1) * width)
    hooks = []
    for module, blocks in _tapped(chunks, taps):
        targets = [states[:, block * width : (block + 1) * width] for block in blocks]
        hooks.append(module.register_forward_hook(_Recorder(places, targets, groups.tp if gathers else None)))
    try:
        yield examples
    finally:
        for hook in hooks:
            hook.remove()
    if not _records(groups):
        return
    # Each stage has filled in its own layers and left zeros elsewhere: the sum has them all.
    dist.reduce(states, dist.get_process_group_ranks(groups.pp)[-1], group=groups.pp)
    if has_draft(groups):
        examples += [_example(place, states, len(taps) * width) for place in places]


def _tapped(chunks: Sequence[Any], taps: Sequence[int]) -> Iterator[tuple[torch.nn.Module, list[int]]]:
    """This rank's modules whose outputs are recorded, with the blocks of columns they fill."""
    for chunk in chunks:
        decoder = unwrap(chunk).decoder
        for layer in decoder.layers:
            blocks = [k for k, tap in enumerate(taps) if tap == layer.layer_number - 1]  # Megatron counts from 1
            if blocks:
                yield layer, blocks
        if decoder.final_layernorm is not None:
            yield decoder.final_layernorm, [len(taps)]


class _Recorder:
    """A forward hook that copies the chosen rows of one module's outputs [length, rows, hidden] into `targets`.

    Every schedule takes the micro-batches through a module in their order.

    Args:
        cut_over: the tensor-parallel group that the outputs are cut over along the sequence; None: they are whole.
    """

    def __init__(
        self, places: Sequence[Place], targets: Sequence[torch.Tensor], cut_over: dist.ProcessGroup | None
    ) -> None:
        self._places, self._targets, self._cut_over = places, targets, cut_over
        self._batch = 0

    def __call__(self, _module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output  # a layer also returns its cross-attention context
        if self._cut_over is not None:
            hidden = gather_from_sequence_parallel_region(hidden, group=self._cut_over)
        for place in self._places:
            if place.batch == self._batch:
                for target in self._targets:
                    own = hidden[place.position : place.position + place.inputs, place.row]
                    target[place.first : place.first + place.inputs] = own
        self._batch += 1


def _example(place: Place, states: torch.Tensor, width: int) -> Example:
    """One sequence out of the recorded states [tokens, width of features + hidden]; copies in the host's memory."""
    own = states[place.first : place.first + len(place.tokens)].to("cpu", copy=True)
    return Example(place.tokens.cpu(), place.prompt_length, own[:, :width].contiguous(), own[:, width:].contiguous())
