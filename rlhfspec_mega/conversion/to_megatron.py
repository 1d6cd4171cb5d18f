"""Writes a Megatron distributed checkpoint from a Hugging Face directory, one piece of a tensor at a time.

Torch's distributed-checkpoint protocol, executed for all ranks one after the other by one process: every rank's plan
lists its blocks, torch merges the plans, and each block is read when it is written.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from rlhfspec_mega.conversion.global_tensors import (
    GlobalTensor,
    extra_states,
    global_tensors,
    pieces,
    stage_of,
)
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.hf_config import write_json
from rlhfspec_mega.models.hf_directory import HfWeights, appearing, copy_hf_files
from rlhfspec_mega.models.mapping.layouts import Partition, Replicated
from rlhfspec_mega.models.model_directory import MEGATRON_CONFIG
from rlhfspec_mega.models.shape import ModelShape, padded_vocab_size

_FORMAT = {  # megatron.core.dist_checkpointing.core.CheckpointingConfig, whose import takes seconds
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
COMMON = "common.pt"
_PIECE = 256 << 20  # bytes of a piece of an embedding


@dataclass(frozen=True)
class RankLayout:
    """Sizes by which tensors are cut into the shards that a checkpoint holds; a run of other sizes can load it, too."""

    tensor: int = 1
    pipeline: int = 1


def write_checkpoint(
    path: Path,
    source: HfWeights,
    shape: ModelShape,
    layout: RankLayout,
    dtype: torch.dtype,
    progress: Callable[[int], None] = lambda written: None,
) -> None:
    """Write a directory that Megatron loads under any parallel sizes, with config.json and tokenizer beside it.

    Args:
        source: a directory whose tensors have been compared with its config.json.
        progress: called with the bytes of each block.

    Raises:
        UserError: sizes that do not divide the model, or `path` exists.
        OSError: it cannot be written.
    """
    check_layout(shape, layout)
    if path.exists():
        raise UserError(f"{path} exists already: name a new directory, or move it away.")
    blocks = _Blocks(source, shape, layout, dtype, progress)
    with appearing(path) as partial:
        _write(partial, blocks)
        torch.save({"content_metadata": {}, "iteration": 0, "checkpoint_version": 3.0}, partial / COMMON)
        copy_hf_files(source.path, partial)
        write_json(partial / MEGATRON_CONFIG, _FORMAT)  # last: it makes the directory a checkpoint


def check_layout(shape: ModelShape, layout: RankLayout) -> None:
    """Raises UserError for sizes that do not divide the model."""
    divided = {"attention heads": shape.num_heads, "KV heads": shape.num_kv_heads, "feed-forward size": shape.ffn_size}
    for name, size in divided.items():
        if layout.tensor < 1 or size % layout.tensor:
            raise UserError(f"A tensor-parallel size of {layout.tensor} does not divide the model's {size} {name}.")
    if layout.pipeline < 1 or shape.num_layers % layout.pipeline:
        raise UserError(
            f"A pipeline-parallel size of {layout.pipeline} does not divide the model's {shape.num_layers} layers."
        )


class _Blocks:
    """The blocks that each rank writes; their data is read when they are written."""

    def __init__(
        self,
        source: HfWeights,
        shape: ModelShape,
        layout: RankLayout,
        dtype: torch.dtype,
        progress: Callable[[int], None],
    ) -> None:
        self._source, self._shape, self._layout = source, shape, layout
        self._dtype, self._progress = dtype, progress
        self._where: dict[MetadataIndex, tuple[GlobalTensor, Partition, int, int]] = {}
        self._shard: tuple[Any, list[Tensor]] = (None, [])  # the blocks of one shard are written one after the other

    def plans(self) -> list[SavePlan]:
        """The plan of each rank, in Megatron's order."""
        tensors = list(global_tensors(self._shape, padded_vocab_size(self._shape.vocab_size, self._layout.tensor)))
        return [
            SavePlan([*self._tensor_items(tensors, stage, rank), *(self._state_items(stage) if rank == 0 else ())])
            for stage in range(self._layout.pipeline)
            for rank in range(self._layout.tensor)
        ]

    def read(self, index: MetadataIndex) -> Tensor | io.BytesIO:
        """The data of an item of a plan."""
        if index not in self._where:
            return _no_extra_state()
        tensor, partition, part, number = self._where[index]
        if self._shard[0] != (tensor, part):
            full = [self._source.lazy(name) for name in tensor.rule.hf_names(tensor.layer)]
            shard = tensor.rule.layout.split(full, partition, part).to(self._dtype)
            self._shard = (
                (tensor, part),
                list(shard.chunk(len(tensor.rule.layout.blocks(tensor.sizes, partition, part)))),
            )
        data = self._shard[1][number].contiguous()
        self._progress(data.nbytes)
        return data.view(tensor.stacked(data.shape))

    def _tensor_items(self, tensors: Sequence[GlobalTensor], stage: int, rank: int) -> Iterator[WriteItem]:
        partition, layers = Partition(self._shape, self._layout.tensor), self._shape.num_layers
        for tensor in tensors:
            elsewhere = stage_of(tensor, self._shape, self._layout.pipeline) != stage
            if elsewhere or (rank > 0 and isinstance(tensor.rule.layout, Replicated)):  # the first rank writes norms
                continue
            whole = torch.Size(tensor.whole(layers))
            nbytes = self._dtype.itemsize * math.prod(tensor.sizes) // partition.tp_size
            for finer, part in pieces(tensor.rule, partition, rank, nbytes, _PIECE):
                for number, block in enumerate(tensor.rule.layout.blocks(tensor.sizes, finer, part)):
                    chunk = ChunkStorageMetadata(
                        torch.Size(tensor.offsets(block.offsets)), torch.Size(tensor.stacked(block.sizes))
                    )
                    index = MetadataIndex(tensor.name, chunk.offsets)
                    self._where[index] = tensor, finer, part, number
                    data = TensorWriteData(chunk, TensorProperties(dtype=self._dtype), whole)
                    yield WriteItem(index, WriteItemType.SHARD, tensor_data=data)

    def _state_items(self, stage: int) -> Iterator[WriteItem]:
        layers = self._shape.num_layers
        per_stage = layers // self._layout.pipeline
        for layer in range(stage * per_stage, (stage + 1) * per_stage):
            for name in extra_states(self._shape):
                yield WriteItem(MetadataIndex(f"{name}/shard_{layer}_{layers}"), WriteItemType.BYTE_IO)


class _LazyPlanner(DefaultSavePlanner):
    """Reads the data of an item when it is written."""

    def __init__(self, blocks: _Blocks) -> None:
        super().__init__(flatten_state_dict=False)
        self._blocks = blocks

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self._blocks.read(write_item.index)


def _write(directory: Path, blocks: _Blocks) -> None:
    """Write the files of all ranks, and torch's metadata."""
    planner, writer = _LazyPlanner(blocks), dcp.FileSystemWriter(directory, thread_count=1)
    writer.set_up_storage_writer(is_coordinator=True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(plan) for plan in blocks.plans()])
    results = [writer.write_data(plan, planner).wait() for plan in writer.prepare_global_plan(plans)]
    writer.finish(metadata, results)


def _no_extra_state() -> io.BytesIO:
    """What Megatron writes for a module without FP8 state."""
    stream = io.BytesIO()
    torch.save([None], stream)
    return stream
