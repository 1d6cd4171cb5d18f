"""numba where it is installed.

Without it the same functions run in Python, a hundred times slower; where `COMPILES` is asked for, torch computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

try:
    from numba import njit
except ImportError:
    njit = None

COMPILES = njit is not None
# Sums in another order and fused products let loops over floats use SIMD; NaN and infinity keep their meaning.
_REORDERED = {"reassoc", "contract", "nsz"}


def compiled(function: Function) -> Function:
    """Compile a function over numbers and arrays at its first call.

    The machine code is kept beside the module or in the user's cache directory, if one of them can be written. It is
    made anew when the module changes, but not when a compiled function of another module that it calls does: then
    delete `__pycache__`.
    """
    return _compiled(function, fastmath=False)


def vectorized(function: Function) -> Function:
    """As `compiled`, for loops over floats whose sums may be taken in any order; to divide by 0 is no error."""
    return _compiled(function, fastmath=_REORDERED, error_model="numpy")


def _compiled(function: Function, **options: Any) -> Function:
    if njit is None:
        return function
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # there is no place for it
        return njit(**options)(function)
