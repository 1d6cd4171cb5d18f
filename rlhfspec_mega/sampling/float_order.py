"""Whole numbers in the order of float32: the compiler finds the largest with SIMD instructions, unlike a float's."""

from __future__ import annotations

import numpy as np

from rlhfspec_mega.compiled import inlined

_SIGN, _REST = np.int32(31), np.int32(0x7FFFFFFF)  # place of the sign, and all other bits


@inlined
def in_order(x: np.float32) -> np.int32:
    """A whole number that is larger for a larger float; NaN's is above or below those of all others."""
    bits = np.float32(x).view(np.int32)
    return np.int32(bits ^ np.int32(np.int32(bits >> _SIGN) & _REST))


@inlined
def of_order(number: np.int32) -> np.float32:
    """The float of which `in_order` makes this number."""
    return np.int32(number ^ np.int32(np.int32(number >> _SIGN) & _REST)).view(np.float32)
