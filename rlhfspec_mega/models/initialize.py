"""Random initial weights under Hugging Face names: the same whatever the parallel layout that trains them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from rlhfspec_mega.models.hf_directory import write_directory
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.types import TensorInfo

_STD = 0.06  # narrow models learn from this; with the usual 0.02 the tiny one stays on a plateau for minutes


def write_initial(directory: Path, shape: ModelShape) -> None:
    """Write random weights as an ordinary Hugging Face directory, without a tokenizer."""
    tensors = mapping_for(shape.architecture).hf_tensors(shape)
    write_directory(directory, shape, initial_tensors(tensors, shape.num_layers, seed=0))


def initial_tensors(tensors: Sequence[TensorInfo], num_layers: int, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, fp32 tensor) of each: norms 1, biases 0, matrices normal with output projections scaled by 1/sqrt(2L)
    (GPT-2's rule, Radford et al. 2019). Each tensor has a generator of its own, keyed by seed and name."""
    for info in tensors:
        if "norm" in info.name:
            yield info.name, torch.ones(info.shape)
        elif info.name.endswith(".bias"):
            yield info.name, torch.zeros(info.shape)
        else:
            generator = torch.Generator().manual_seed(seed * 2**32 + zlib.crc32(info.name.encode()))
            is_output = info.name.endswith(("o_proj.weight", "down_proj.weight"))
            std = _STD / (2 * num_layers) ** 0.5 if is_output else _STD
            yield info.name, torch.randn(info.shape, generator=generator) * std
