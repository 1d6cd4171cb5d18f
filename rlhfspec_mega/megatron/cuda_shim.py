"""Lets Megatron-core 0.16 run where there is no CUDA: inside the context "cuda" means cpu.

Megatron spells its device as the literal "cuda" in functions of several hundred lines (schedules, clipping, optimizer,
pipeline communication), so a function mode that translates the spelling is smaller and safer than patches by name.
Nothing is changed where CUDA is available. A function mode is per thread: enter it in each call that touches Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


class _CudaMeansCpu(TorchFunctionMode):
    """Translates device arguments, `Tensor.cuda()` and the type strings that Megatron compares."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1).replace("cuda.cuda.", "cuda.")  # if entered twice
        if kwargs and _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **(kwargs or {}))


def _replacements() -> list[tuple[Any, str, Callable[..., Any]]]:
    """(module, attribute, stand-in) of the CUDA calls Megatron makes outside tensor functions."""
    from megatron.core.tensor_parallel import random as megatron_random

    empty = torch.empty(0, dtype=torch.uint8)
    return [
        (torch.cuda, "current_device", lambda: _CPU),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "empty_cache", lambda: None),
        (torch.cuda, "current_stream", lambda *_: None),
        (torch.cuda, "get_rng_state", lambda *_: empty),
        # Dropout is 0 everywhere, so the model-parallel generators are never drawn from.
        (megatron_random, "_get_cuda_rng_state", lambda *_, **__: empty),
        (megatron_random, "_set_cuda_rng_state", lambda *_, **__: None),
    ]


@contextmanager
def cuda_means_cpu() -> Iterator[None]:
    """Run Megatron calls on the CPU; does nothing where CUDA is available. Re-entrant."""
    if torch.cuda.is_available():
        yield
        return
    replacements = _replacements()
    saved = [getattr(module, name) for module, name, _ in replacements]
    for module, name, stand_in in replacements:
        setattr(module, name, stand_in)
    try:
        with _CudaMeansCpu():
            yield
    finally:
        for (module, name, _), original in zip(replacements, saved, strict=True):
            setattr(module, name, original)
