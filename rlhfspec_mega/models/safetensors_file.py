"""Writes safetensors files tensor by tensor, in any order, without ever holding one in memory.

`safetensors.torch.save_file` takes all tensors of a file at once: a shard of several GiB.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from rlhfspec_mega.types import TensorInfo

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CODES = {name: code for code, name in DTYPES.items()}
_ALIGNMENT = 8  # of the data, as the format asks


@contextmanager
def safetensors_file(path: Path, tensors: Sequence[TensorInfo]) -> Iterator[dict[str, Tensor]]:
    """Create a file of these tensors; what is written into the tensors by name is in the file, on disk at the end.

    The pages belong to the file, so they are no anonymous memory. The space is reserved first: a full disk ends here.

    Raises OSError.
    """
    header = _header(tensors)
    sizes = [size_of(tensor) for tensor in tensors]
    with path.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, len(header) + sum(sizes))
        file.write(header)
        file.flush()
        mapped = torch.from_file(str(path), shared=True, size=len(header) + sum(sizes), dtype=torch.uint8)
        found, position = {}, len(header)
        for tensor, size in zip(tensors, sizes, strict=True):
            raw = mapped[position : position + size]
            found[tensor.name] = raw.view(getattr(torch, tensor.dtype)).view(tensor.shape)
            position += size
        yield found
        os.fsync(file.fileno())


def size_of(tensor: TensorInfo) -> int:
    """Bytes of a tensor."""
    return math.prod(tensor.shape) * getattr(torch, tensor.dtype).itemsize


def _header(tensors: Sequence[TensorInfo]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        end = position + size_of(tensor)
        entries[tensor.name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
