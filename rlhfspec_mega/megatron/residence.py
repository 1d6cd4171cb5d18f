"""Where a model's tensors are while it is not used: in host memory or on the device. On a CPU nothing moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch


def to_host(chunks: Sequence[Any], optimizer: Any, device: torch.device) -> None:
    """Move weights and optimizer to host memory and free gradients; `optimizer` is None for a frozen model."""
    if device.type == "cpu":
        return
    if optimizer is None:
        for parameter in _parameters(chunks):
            parameter.data = _pinned(parameter)
    else:
        for buffer in _buffers(chunks):
            buffer.offload_to_cpu()
        optimizer.offload_to_cpu()
    torch.cuda.empty_cache()  # other processes use this device


def to_device(chunks: Sequence[Any], optimizer: Any, device: torch.device) -> None:
    """Undo `to_host`."""
    if device.type == "cpu":
        return
    if optimizer is None:
        for parameter in _parameters(chunks):
            parameter.data = parameter.data.to(device, non_blocking=True)
    else:
        for buffer in _buffers(chunks):
            buffer.reload_from_cpu()
        optimizer.restore_from_cpu()
    torch.cuda.synchronize(device)


def _pinned(parameter: torch.nn.Parameter) -> torch.Tensor:
    """A pinned copy of the parameter's values in host memory, which transfers fast."""
    host: torch.Tensor | None = getattr(parameter, "host_copy", None)
    if host is None:  # allocated once: a frozen model's weights do not change
        host = torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=True)
        parameter.host_copy = host  # type: ignore[attr-defined]
        host.copy_(parameter.data)
    return host


def _parameters(chunks: Sequence[Any]) -> Iterator[torch.nn.Parameter]:
    for chunk in chunks:
        yield from chunk.parameters()


def _buffers(chunks: Sequence[Any]) -> Iterator[Any]:
    """Megatron's contiguous buffers, which parameters and gradients are views of."""
    for chunk in chunks:
        yield from chunk.buffers
