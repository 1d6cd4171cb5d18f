"""Buckets: full tensors cut into byte buffers of bounded size, each from one pipeline stage, with a checksum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
import torch
from torch import Tensor

from rlhfspec_mega.errors import RunError, UserError
from rlhfspec_mega.types import TensorInfo

ALIGNMENT = 16  # bytes; every piece starts at a multiple, so that its bytes can be viewed as any dtype
_CHUNK_WORDS = 1 << 18  # 32-bit words per partial sum: 2 MiB as int64, which fits a CPU cache
_MULTIPLIER = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number, odd


@dataclass(frozen=True)
class Piece:
    """`count` elements of the flattened tensor `name` from element `start`, at byte `offset` of the bucket."""

    name: str
    start: int
    count: int
    dtype: str
    offset: int


@dataclass(frozen=True)
class Bucket:
    """One message of a weight update. `owner` is the pipeline stage that holds all its pieces; `bytes` its length."""

    id: int
    owner: int
    pieces: tuple[Piece, ...]
    bytes: int

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(piece.name for piece in self.pieces))


def plan_buckets(tensors: Sequence[TensorInfo], owner: Callable[[str], int], bucket_bytes: int) -> list[Bucket]:
    """Cut tensors into buckets of at most `bucket_bytes`, stage after stage, in the given order within a stage.

    Only a tensor larger than a bucket is cut, at multiples of 16 bytes. The plan is a function of the arguments, so
    every process computes its own. `TensorInfo.dtype` is the dtype sent. Raises UserError for a bucket under 16 bytes.
    """
    if bucket_bytes < ALIGNMENT:
        raise UserError(f"A bucket of {bucket_bytes} bytes holds no tensor: set resharding.bucket_mib to 1 or more.")
    limit = bucket_bytes // ALIGNMENT * ALIGNMENT
    owners = {tensor.name: owner(tensor.name) for tensor in tensors}
    buckets: list[Bucket] = []
    for stage in sorted(set(owners.values())):
        pieces: list[Piece] = []
        used = 0
        for tensor in tensors:
            if owners[tensor.name] != stage:
                continue
            size = _itemsize(tensor.dtype)
            numel = prod(tensor.shape)
            for start in range(0, numel, limit // size):
                count = min(limit // size, numel - start)
                if used + count * size > limit:
                    buckets.append(Bucket(len(buckets), stage, tuple(pieces), used))
                    pieces, used = [], 0
                pieces.append(Piece(tensor.name, start, count, tensor.dtype, used))
                used += -(-count * size // ALIGNMENT) * ALIGNMENT
        if pieces:
            buckets.append(Bucket(len(buckets), stage, tuple(pieces), used))
    return buckets


def pack(bucket: Bucket, tensors: Iterable[tuple[str, Tensor]], buffer: Tensor) -> Tensor:
    """Copy a bucket's pieces out of full tensors, cast to the planned dtype.

    Args:
        tensors: (name, full tensor) pairs, consumed one by one, so that each tensor can be gathered when it is needed
            and dropped afterwards; names outside the bucket are ignored.
        buffer: uint8 of at least `bucket.bytes`, on any device.

    Returns: `buffer[:bucket.bytes]`, with gaps between pieces zeroed. Raises RunError if a piece's tensor is missing.
    """
    flat = buffer[: bucket.bytes]
    by_name: dict[str, list[Piece]] = {}
    for piece in bucket.pieces:
        by_name.setdefault(piece.name, []).append(piece)
    for name, tensor in tensors:
        for piece in by_name.pop(name, ()):
            end = piece.offset + piece.count * _itemsize(piece.dtype)
            flat[end : -(-end // ALIGNMENT) * ALIGNMENT].zero_()
            values = tensor.detach().reshape(-1)[piece.start : piece.start + piece.count]
            flat[piece.offset : end].view(getattr(torch, piece.dtype)).copy_(values)
    if by_name:
        raise RunError(f"Bucket {bucket.id} of pipeline stage {bucket.owner} was not given {', '.join(by_name)}.")
    return flat


def unpack(bucket: Bucket, buffer: Tensor) -> list[tuple[str, int, Tensor]]:
    """(name, first element, flat values) of each piece; the values are views of the uint8 `buffer`."""
    return [
        (piece.name, piece.start, part.view(getattr(torch, piece.dtype)))
        for piece in bucket.pieces
        for part in [buffer[piece.offset : piece.offset + piece.count * _itemsize(piece.dtype)]]
    ]


def checksum(tensor: Tensor) -> int:
    """64-bit checksum of a tensor's bytes, computed on its device, the same on every device.

    A sum of 32-bit words, each times an odd pseudo-random 64-bit weight of its position, in wrapping int64 arithmetic:
    any single changed word changes it, and so do swapped words or chunks. Works in chunks; needs about 6 MiB.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    length = data.numel()
    words_bytes = length // 4 * 4
    rest = torch.zeros(4, dtype=torch.uint8, device=data.device)
    rest[: length - words_bytes] = data[words_bytes:]
    words = data[:words_bytes]
    if words.storage_offset() % 4:  # not aligned to 32-bit words
        words = words.clone()
    weights = _position_weights(str(data.device))
    total = torch.full((), length, dtype=torch.int64, device=data.device)
    for chunk in (*words.view(torch.int32).split(_CHUNK_WORDS), rest.view(torch.int32)):
        total = total * _MULTIPLIER + (chunk.to(torch.int64) * weights[: chunk.numel()]).sum()
    return int(total) % (1 << 64)


@lru_cache
def _position_weights(device: str) -> Tensor:
    """Odd int64 weights of the positions in a chunk: splitmix64 of the position (Steele et al., OOPSLA 2014)."""
    z = np.arange(1, _CHUNK_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)).to(device)


def _itemsize(dtype: str) -> int:
    return getattr(torch, dtype).itemsize
