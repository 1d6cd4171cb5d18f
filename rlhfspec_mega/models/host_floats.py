"""float32 and bfloat16 tensors in compiled loops, which compute in float32.

NumPy knows no bfloat16, which is the upper half of a float32: such tensors come as words, uint16.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rlhfspec_mega.compiled import inlined

Single = float | np.float32
Floats = NDArray[np.float32] | NDArray[np.uint16]  # the second is bfloat16

HOST_DTYPES = (torch.float32, torch.bfloat16)
_HALF, _ONE, _BELOW_HALF = np.uint32(16), np.uint32(1), np.uint32(0x7FFF)
_NAN = np.uint32(0x7FC0)  # its upper half


def host_array(tensor: torch.Tensor) -> Floats:
    """The memory of a tensor of one of HOST_DTYPES on a CPU, for compiled functions."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


# The size of an element is known when a function is compiled, which leaves one of the two ways. A loop that reads and
# writes tensors of the same dtype gets no SIMD instructions: it puts its results in a float32 vector, and another loop
# stores them.


@inlined
def load(values: Floats, place: int) -> Single:
    """The element of a vector as a float32."""
    if values.itemsize == 2:
        return np.uint32(np.uint32(values[place]) << _HALF).view(np.float32)
    return np.float32(values[place])


@inlined
def store(values: Floats, results: NDArray[np.float32]) -> None:
    """Write a float32 vector to one of the same length; bfloat16 is rounded, halves to even."""
    for place in range(len(values)):
        if values.itemsize == 2:
            bits, number = np.float32(results[place]).view(np.uint32), results[place] == results[place]
            odd = np.uint32(np.uint32(bits >> _HALF) & _ONE)
            rounded = np.uint32(np.uint32(bits + np.uint32(odd + _BELOW_HALF)) >> _HALF)
            values[place] = np.uint16(rounded if number else _NAN)
        else:
            values[place] = results[place]
