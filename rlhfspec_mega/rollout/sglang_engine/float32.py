"""What SGLang's kernels lack for engines in float32, whose tokens can be held against those of other engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def normalize(
    original: Callable[..., Any], norm: Any, x: torch.Tensor, residual: Any = None, post_residual_addition: Any = None
) -> Any:
    """Around RMSNorm.forward_cuda: its kernel knows half precision only, and PyTorch's operations any. Not run yet."""
    if x.dtype == torch.float32:
        return norm.forward_native(x, residual, post_residual_addition)
    return original(norm, x, residual, post_residual_addition)
