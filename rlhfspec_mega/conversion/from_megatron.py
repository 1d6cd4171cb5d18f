"""Reads the weights of a Megatron distributed checkpoint, whatever ranks wrote it, into Hugging Face tensors."""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from rlhfspec_mega.conversion.global_tensors import LAYERS, GlobalTensor, global_tensors
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.models.hf_config import listed
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.models.mapping.layouts import Partition
from rlhfspec_mega.models.model_directory import MEGATRON_CONFIG
from rlhfspec_mega.models.shape import VOCABULARY_MULTIPLE, ModelShape

METADATA_FILE = ".metadata"
_MODEL = ("embedding.", "decoder.", "output_layer.")  # how Megatron's names of a language model's weights begin
_MOST_RANKS = 64  # tensor-parallel ranks for which a vocabulary may have been padded


@dataclass(frozen=True)
class _Found:
    """Where a global tensor is in the checkpoint: its name there, and the layer's index if layers are stacked."""

    name: str
    layer: int | None


class MegatronWeights:
    """The weights in a checkpoint's directory; optimizer and random states beside them are left alone.

    Raises UserError if it is no such checkpoint, damaged, or disagrees with the shape.
    """

    def __init__(self, path: Path, shape: ModelShape) -> None:
        self.path, self.shape = path, shape
        _check_format(path)
        self._reader = dcp.FileSystemReader(path)
        self._metadata = _read_metadata(path, self._reader)
        self._stored = {
            name: tensor
            for name, tensor in self._metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata) and name.startswith(_MODEL)
        }
        if not self._stored:
            raise UserError(f"{path} holds no weights of a language model under Megatron's names.")
        self._rows = self._vocab_rows()
        self._found = self._match()
        _check_files(path, self._metadata, set(self._stored))
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    @property
    def dtype(self) -> str:
        """The dtype of the weights, e.g. "bfloat16". Raises UserError if there are several."""
        dtypes = {str(tensor.properties.dtype).removeprefix("torch.") for tensor in self._stored.values()}
        if len(dtypes) > 1:
            raise UserError(f"{self.path} holds weights of several dtypes ({listed(sorted(dtypes))}): choose one.")
        return dtypes.pop()

    def fingerprint(self) -> tuple[str, int]:
        """What tells this save from every other: the shape, and the checksum of torch's metadata with its unique id."""
        return repr(self.shape), zlib.crc32((self.path / METADATA_FILE).read_bytes())

    def copy_into(self, tensors: Mapping[str, Tensor], progress: Callable[[int], None] = lambda written: None) -> None:
        """Fill every full tensor of the shape, by its Hugging Face name, converting dtypes.

        Args:
            progress: called with the bytes of each parameter.

        Raises:
            UserError: a file cannot be read.
        """
        for names in self.parameters():
            into = [tensors[name] for name in names]
            self.read_into(names, into)
            progress(sum(target.nbytes for target in into))

    def parameters(self) -> Iterator[tuple[str, ...]]:
        """For each of Megatron's parameters, the Hugging Face names of the tensors in it, in model order."""
        return iter(self._found)

    def read_into(self, names: Sequence[str], into: Sequence[Tensor]) -> None:
        """Fill the full tensors of one parameter. Raises UserError if a file cannot be read."""
        partition = Partition(self.shape, 1, self._rows)
        tensor, found = self._found[tuple(names)]
        blocks = tensor.rule.layout.blocks(tensor.sizes, partition, 0)
        if len(blocks) == len(into):  # each Hugging Face tensor is the beginning of a block: read it in place
            for block, target in zip(blocks, into, strict=True):
                self._read(found, block.offsets, target)
            return
        whole = torch.empty(tensor.sizes, dtype=into[0].dtype)
        self._read(found, (0,) * whole.dim(), whole)
        for target, part in zip(into, tensor.rule.layout.merge([whole], partition), strict=True):
            target.copy_(part)

    def _read(self, found: _Found, offsets: tuple[int, ...], target: Tensor) -> None:
        """Fill `target` with the block that begins at `offsets` of a tensor, out of all stored blocks that it meets."""
        if found.layer is not None:
            offsets, target = (found.layer, *offsets), target.unsqueeze(0)
        wanted = ChunkStorageMetadata(torch.Size(offsets), target.shape)
        items = create_read_items_for_chunk_list(found.name, self._stored[found.name], [wanted])
        if sum(item.lengths.numel() for item in items) != target.numel():
            raise UserError(f"{self.path} does not hold all of {found.name}: it is incomplete.")
        try:
            self._reader.read_data(LoadPlan(items), _Target(target))
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, AssertionError) as error:
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise UserError(f"{found.name} cannot be read from {self.path}, which is damaged ({first}).") from None

    def _vocab_rows(self) -> int:
        """Rows of the embedding, padding included."""
        name, vocab = mapping_for(self.shape.architecture).embedding.megatron[0], self.shape.vocab_size
        if name not in self._stored:
            raise UserError(f"{self.path} has no tensor {name}: it is incomplete or of another model.")
        rows = self._stored[name].size[0]
        if not vocab <= rows < vocab + VOCABULARY_MULTIPLE * _MOST_RANKS:
            raise UserError(
                f"{self.path} has an embedding of {rows} rows, which does not fit the vocabulary of {vocab} in its "
                "config.json: it is of another model."
            )
        return rows

    def _match(self) -> dict[tuple[str, ...], tuple[GlobalTensor, _Found]]:
        """Where each parameter is, by its Hugging Face names. Raises UserError if the checkpoint holds others."""
        matched, missing, left = {}, [], set(self._stored)
        for tensor in global_tensors(self.shape, self._rows):
            found = self._find(tensor)
            if found is None:
                missing.append(tensor.name if tensor.layer is None else f"{tensor.name} of layer {tensor.layer}")
                continue
            left.discard(found.name)
            matched[tuple(tensor.rule.hf_names(tensor.layer))] = tensor, found
            there = tuple(self._stored[found.name].size)
            wanted = tensor.sizes if found.layer is None else tensor.whole(self.shape.num_layers)
            if there != wanted:
                raise UserError(
                    f"{self.path} does not fit its config.json: {found.name} is {list(there)}, not {list(wanted)}."
                )
        if missing:
            raise UserError(f"{self.path} lacks {listed(missing)}: it is incomplete or does not fit its config.json.")
        if left:
            raise UserError(
                f"{self.path} holds {listed(sorted(left))}, which a {self.shape.architecture} model of its config.json "
                "does not have: it is of another model."
            )
        return matched

    def _find(self, tensor: GlobalTensor) -> _Found | None:
        """The tensor under one of its spellings; layers are stacked, or each has its number in its name."""
        for spelling in tensor.rule.megatron:
            if tensor.layer is None:
                candidates = [_Found(spelling, None)]
            else:
                candidates = [
                    _Found(LAYERS + spelling, tensor.layer),
                    _Found(f"{LAYERS}{tensor.layer}.{spelling}", None),
                ]
            for found in candidates:
                if found.name in self._stored:
                    return found
        return None


class _Target(DefaultLoadPlanner):
    """Reads everything into one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._target = target

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._target


def _check_format(path: Path) -> None:
    try:
        backend = json.loads((path / MEGATRON_CONFIG).read_text(encoding="utf-8"))["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path / MEGATRON_CONFIG} cannot be read: the checkpoint is damaged.") from None
    if backend != "torch_dist":
        raise UserError(
            f"{path} is a checkpoint of format {backend}: save it again with Megatron's --ckpt-format torch_dist."
        )


def _read_metadata(path: Path, reader: dcp.FileSystemReader) -> Metadata:
    try:
        metadata: Any = reader.read_metadata()
    except FileNotFoundError:
        raise UserError(
            f"{path} has no {METADATA_FILE}: the checkpoint is incomplete; copy hidden files, too."
        ) from None
    except Exception as error:  # unpickling damaged bytes raises anything
        raise UserError(f"{path / METADATA_FILE} is damaged ({type(error).__name__}).") from None
    if not isinstance(metadata, Metadata):
        raise UserError(f"{path / METADATA_FILE} is damaged: it holds no metadata of torch's distributed checkpoints.")
    return metadata


def _check_files(path: Path, metadata: Metadata, names: set[str]) -> None:
    """Refuse a checkpoint of which a file is missing, or ends before a block of the tensors ends."""
    ends: dict[str, int] = {}
    for index, storage in metadata.storage_data.items():
        if index.fqn in names:
            ends[storage.relative_path] = max(ends.get(storage.relative_path, 0), storage.offset + storage.length)
    for file, end in sorted(ends.items()):
        try:
            size = (path / file).stat().st_size
        except OSError:
            raise UserError(f"{path} lacks the file {file}: the checkpoint is incomplete.") from None
        if size < end:
            raise UserError(f"{path / file} is truncated: {size} bytes where at least {end} belong.")
