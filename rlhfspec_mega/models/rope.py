"""Rotary position embedding in Hugging Face's half-rotation layout, with Llama-3's frequency scaling."""

from __future__ import annotations

import math
from functools import partial
from typing import Protocol

import torch

from rlhfspec_mega.models.host_kernels import rotate_heads_, suits_host_kernels
from rlhfspec_mega.models.shape import ModelShape


class Rotary:
    """The rotary embedding of one model.

    Args:
        positions: most positions, of which (cos, sin) are kept.
    """

    def __init__(self, shape: ModelShape, positions: int, dtype: torch.dtype, device: torch.device | str):
        cos, sin = rope_table(shape, positions, device)
        self._cos, self._sin = cos.to(dtype), sin.to(dtype)
        self._on_host = suits_host_kernels(self._cos)

    def at(self, positions: torch.Tensor) -> Rotation:
        """The rotation of tokens at these positions, int64 [N]."""
        if self._on_host:
            return partial(rotate_heads_, cos=self._cos, sin=self._sin, positions=positions)
        return partial(_rotate_heads_, cos=self._cos[positions, None], sin=self._sin[positions, None])


class Rotation(Protocol):
    """The rotation of some tokens, for all layers."""

    def __call__(self, qkv: torch.Tensor, *, heads: int) -> None:
        """Rotate the first `heads` heads of qkv [N, ..., head_dim] in place."""


def rope_table(shape: ModelShape, positions: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) float32 [positions, head_dim] for `Rotary`; the first half of sin carries the rotation's minus sign.

    Angles are float32 products, as in the models' reference implementations: at long positions a more exact angle
    would be a different one from the angle the weights were trained with.
    """
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), _inverse_frequencies(shape))
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).to(device), torch.cat((-sin, sin), dim=-1).to(device)


def _rotate_heads_(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> None:
    rotated = qkv[:, :heads]
    swapped = rotated.roll(rotated.shape[-1] // 2, dims=-1)
    rotated.mul_(cos).addcmul_(swapped, sin)


def _inverse_frequencies(shape: ModelShape) -> torch.Tensor:
    """float32 [head_dim / 2]; `rope_scaling` as published with Llama 3.1 (keys as in its config.json)."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
    plain = 1.0 / shape.rope_theta**exponents
    if shape.rope_scaling is None:
        return plain
    factor = shape.rope_scaling["factor"]
    low, high = shape.rope_scaling["low_freq_factor"], shape.rope_scaling["high_freq_factor"]
    turns = shape.rope_scaling["original_max_position_embeddings"] / (2 * math.pi / plain)
    # Fewer than `low` turns over the original context: stretched; more than `high`: kept; between: a linear blend.
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * plain + (1 - kept) * plain / factor
