"""This rank's Megatron parameters by the mapping table: loading from and merging into Hugging Face tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.utils import is_pp_first_stage, is_pp_last_stage
from megatron.core.process_groups_config import ProcessGroupCollection

from rlhfspec_mega.megatron.build import unwrap
from rlhfspec_mega.megatron.value_head import initial_value_head
from rlhfspec_mega.models.hf_directory import HfWeights
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.models.mapping.layouts import Partition, Sliceable
from rlhfspec_mega.models.mapping.table import Rule
from rlhfspec_mega.models.shape import ModelShape

_LOCAL_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


@dataclass(frozen=True)
class MappedParameter:
    """A parameter of this rank with its rule and global layer number (None outside the layers)."""

    parameter: torch.nn.Parameter
    rule: Rule
    layer: int | None
    is_tied_copy: bool

    @property
    def hf_names(self) -> list[str]:
        return self.rule.hf_names(self.layer)


def mapped_parameters(chunks: Sequence[Any], shape: ModelShape) -> Iterator[MappedParameter]:
    """Every parameter of this rank; raises RunError for one the architecture's table does not know."""
    mapping = mapping_for(shape.architecture)
    for chunk in chunks:
        model = unwrap(chunk)
        for name, parameter in model.named_parameters():
            match = _LOCAL_LAYER.match(name)
            if match:  # module names count from this stage's first layer; layer_number is global, from 1
                layer = model.decoder.layers[int(match[1])].layer_number - 1
                name = f"decoder.layers.{layer}.{name[match.end() :]}"
            rule, layer_number = mapping.rule_for(name, shape)
            is_copy = shape.tie_embeddings and name.startswith("output_layer.")
            yield MappedParameter(parameter, rule, layer_number, is_copy)


def tensors_for(shape: ModelShape, path: Path) -> Callable[[str], Sliceable]:
    """The tensors of a directory by name, and a new value head where the shape has one and the directory has none."""
    weights, head = HfWeights(path), mapping_for(shape.architecture).value_head.hf_names(None)[0]
    new_head = shape.value_head and head not in weights.names()
    return lambda name: initial_value_head(shape.hidden_size) if new_head and name == head else weights.lazy(name)


def load_parameters(
    chunks: Sequence[Any],
    shape: ModelShape,
    groups: ProcessGroupCollection,
    tensor: Callable[[str], Sliceable],
    optimizer: Any = None,
) -> None:
    """Fill this rank's shards from full tensors and, with an optimizer, its fp32 main weights from them.

    Args:
        tensor: gives a full (possibly lazy) tensor by its Hugging Face name.
    """
    partition, rank = Partition(shape, groups.tp.size()), groups.tp.rank()
    with torch.no_grad():
        for mapped in mapped_parameters(chunks, shape):
            full = [tensor(name) for name in mapped.hf_names]
            mapped.parameter.copy_(mapped.rule.layout.split(full, partition, rank))
    if optimizer is not None:
        optimizer.reload_model_params()


def merge_parameter(
    mapped: MappedParameter, shape: ModelShape, group: dist.ProcessGroup
) -> dict[str, torch.Tensor] | None:
    """Gather one parameter on the first rank of its tensor-parallel group; collective over it.

    Returns:
        {Hugging Face name: full tensor} on that rank, None on the others.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    shard = mapped.parameter.detach()
    shards = [shard]
    if size > 1:
        gathered = [torch.empty_like(shard) for _ in range(size)] if rank == 0 else None
        dist.gather(shard.contiguous(), gathered, dst=dist.get_global_rank(group, 0), group=group)
        shards = gathered or []
    if rank != 0:
        return None
    merged = mapped.rule.layout.merge(shards, Partition(shape, size))
    return dict(zip(mapped.hf_names, merged, strict=True))


def embedding_and_head(
    chunks: Sequence[Any], shape: ModelShape, groups: ProcessGroupCollection
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The full embedding and output head, both [vocab, hidden], on the last stage's first tensor-parallel rank.

    They are one tensor where embeddings are tied. Collective over the ranks of a data-parallel replica; None elsewhere.
    """
    first, last = is_pp_first_stage(groups.pp), is_pp_last_stage(groups.pp)
    travels = not shape.tie_embeddings and not (first and last)  # a tied embedding has a copy on the last stage
    if not (last or (first and travels)):
        return None
    mapping = mapping_for(shape.architecture)
    merged: dict[str, torch.Tensor] = {}
    for mapped in mapped_parameters(chunks, shape):
        if mapped.rule in (mapping.embedding, mapping.head):
            merged |= merge_parameter(mapped, shape, groups.tp) or {}
    if groups.tp.rank() != 0:
        return None
    (embedding_name,), (head_name,) = mapping.embedding.hf_names(None), mapping.head.hf_names(None)
    if travels:
        stages = dist.get_process_group_ranks(groups.pp)
        if first:
            dist.send(merged[embedding_name].contiguous(), stages[-1], group=groups.pp)
            return None
        merged[embedding_name] = torch.empty_like(merged[head_name])
        dist.recv(merged[embedding_name], stages[0], group=groups.pp)
    return merged[embedding_name], merged[embedding_name if shape.tie_embeddings else head_name]
