"""Layouts: how one Megatron parameter, cut over tensor-parallel ranks, holds one or more full Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.models.shape import ModelShape, padded_vocab_size


class Sliceable(Protocol):
    """A full tensor of which parts can be read: a torch.Tensor, or a lazy one in a file."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, index: Any, /) -> Tensor: ...


@dataclass(frozen=True)
class Partition:
    """What a layout must know besides the tensors: the model's sizes, the tensor-parallel size, the padded vocabulary.

    `padded_vocab` None means `padded_vocab_size(shape.vocab_size, tp_size)`.
    """

    shape: ModelShape
    tp_size: int
    padded_vocab: int | None = None

    @property
    def vocab_rows(self) -> int:
        if self.padded_vocab is None:
            return padded_vocab_size(self.shape.vocab_size, self.tp_size)
        return self.padded_vocab

    def span(self, length: int, rank: int) -> tuple[int, int]:
        """Return start and stop of a rank's shard of a dimension of `length`, split evenly.

        Raises UserError if `length` is not divisible by the number of ranks.
        """
        if length % self.tp_size:
            raise UserError(
                f"A weight dimension of {length} cannot be cut into {self.tp_size} tensor-parallel parts: "
                "choose actor.tensor_parallel so that it divides heads, FFN size and padded vocabulary."
            )
        part = length // self.tp_size
        return rank * part, (rank + 1) * part


@dataclass(frozen=True)
class Block:
    """A rectangle of a tensor: where it begins and how long it is, by dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Layout(Protocol):
    """`split` and `merge` are inverse to each other, bit by bit.

    Megatron's distributed checkpoints know no ranks: they hold each parameter as one global tensor, which is the merged
    one, except that the query groups of attention stay together. `blocks` says what a rank's shard is of it.
    """

    def split(self, tensors: Sequence[Sliceable], partition: Partition, rank: int) -> Tensor:
        """Megatron shard of tensor-parallel `rank`; reads only the parts it needs; may be a view of its input."""
        ...

    def merge(self, shards: Sequence[Tensor], partition: Partition) -> list[Tensor]:
        """Full Hugging Face tensors from the shards of all ranks, in rank order; may be views of the shards."""
        ...

    def blocks(self, full: tuple[int, ...], partition: Partition, rank: int) -> list[Block]:
        """The blocks of the global tensor (of sizes `full`) that the shard of a rank consists of, along dim 0."""
        ...


class Replicated:
    """The same tensor on every rank (norms)."""

    def split(self, tensors: Sequence[Sliceable], partition: Partition, rank: int) -> Tensor:
        return tensors[0][:]

    def merge(self, shards: Sequence[Tensor], partition: Partition) -> list[Tensor]:
        return [shards[0]]

    def blocks(self, full: tuple[int, ...], partition: Partition, rank: int) -> list[Block]:
        return [Block((0,) * len(full), full)]


class Row:
    """Cut along dim 1, the input dimension of a row-parallel linear layer."""

    def split(self, tensors: Sequence[Sliceable], partition: Partition, rank: int) -> Tensor:
        first, last = partition.span(tensors[0].shape[1], rank)
        return tensors[0][:, first:last]

    def merge(self, shards: Sequence[Tensor], partition: Partition) -> list[Tensor]:
        return [torch.cat(list(shards), dim=1)]

    def blocks(self, full: tuple[int, ...], partition: Partition, rank: int) -> list[Block]:
        first, last = partition.span(full[1], rank)
        return [Block((0, first), (full[0], last - first))]


class Gated:
    """[gate; up] of each rank: both halves are cut along dim 0 and stacked per rank (Megatron's gated linear_fc1)."""

    def split(self, tensors: Sequence[Sliceable], partition: Partition, rank: int) -> Tensor:
        first, last = partition.span(tensors[0].shape[0], rank)
        return torch.cat([tensor[first:last] for tensor in tensors])

    def merge(self, shards: Sequence[Tensor], partition: Partition) -> list[Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[0] for half in halves]), torch.cat([half[1] for half in halves])]

    def blocks(self, full: tuple[int, ...], partition: Partition, rank: int) -> list[Block]:
        half = full[0] // 2
        first, last = partition.span(half, rank)
        return [Block((start, 0), (last - first, full[1])) for start in (first, half + first)]


class QKV:
    """Rows [queries of the group, key, value] for one query group after another, then cut evenly along dim 0.

    This is the order in which Megatron's SelfAttention.get_query_key_value_tensors takes `linear_qkv` apart; with more
    ranks than groups a rank holds a part of a group's rows. Weight and bias alike.
    """

    def split(self, tensors: Sequence[Sliceable], partition: Partition, rank: int) -> Tensor:
        query_rows, head_rows = self._group_rows(partition.shape)
        group_rows = query_rows + 2 * head_rows
        first, last = partition.span(partition.shape.num_kv_heads * group_rows, rank)
        low, high = first // group_rows, -(-last // group_rows)  # the groups this rank has a part of
        query, key, value = (
            tensor[low * rows : high * rows].unflatten(0, (high - low, rows))
            for tensor, rows in zip(tensors, (query_rows, head_rows, head_rows), strict=True)
        )
        return torch.cat([query, key, value], dim=1).flatten(0, 1)[first - low * group_rows : last - low * group_rows]

    def merge(self, shards: Sequence[Tensor], partition: Partition) -> list[Tensor]:
        query_rows, head_rows = self._group_rows(partition.shape)
        groups = torch.cat(list(shards)).unflatten(0, (partition.shape.num_kv_heads, query_rows + 2 * head_rows))
        return [part.flatten(0, 1) for part in groups.split([query_rows, head_rows, head_rows], dim=1)]

    @staticmethod
    def _group_rows(shape: ModelShape) -> tuple[int, int]:
        """Rows of the queries and of the one key (or value) of a query group."""
        return shape.num_heads // shape.num_kv_heads * shape.head_dim, shape.head_dim

    def blocks(self, full: tuple[int, ...], partition: Partition, rank: int) -> list[Block]:
        return _rows(full, partition, rank)


class Vocabulary:
    """Cut along dim 0 after padding with zero rows; the padding is dropped again on merge."""

    def split(self, tensors: Sequence[Sliceable], partition: Partition, rank: int) -> Tensor:
        vocab_size = partition.shape.vocab_size
        first, last = partition.span(partition.vocab_rows, rank)
        rows = tensors[0][min(first, vocab_size) : min(last, vocab_size)]
        padding = rows.new_zeros(last - first - rows.shape[0], *rows.shape[1:])
        return torch.cat([rows, padding])

    def merge(self, shards: Sequence[Tensor], partition: Partition) -> list[Tensor]:
        full = torch.cat(list(shards))
        if full.shape[0] < partition.shape.vocab_size:
            raise RunError(
                f"The embedding shards hold {full.shape[0]} rows, fewer than the vocabulary of "
                f"{partition.shape.vocab_size}: a tensor-parallel shard is missing."
            )
        return [full[: partition.shape.vocab_size]]

    def blocks(self, full: tuple[int, ...], partition: Partition, rank: int) -> list[Block]:
        return _rows(full, partition, rank)


def _rows(full: tuple[int, ...], partition: Partition, rank: int) -> list[Block]:
    first, last = partition.span(full[0], rank)
    return [Block((first,) + (0,) * (len(full) - 1), (last - first, *full[1:]))]
