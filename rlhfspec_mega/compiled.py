"""numba where it is installed; without it the same functions run in Python, a hundred times slower."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

try:
    from numba import njit
except ImportError:
    njit = None


def compiled(function: Function) -> Function:
    """Compile a function over numbers and arrays at its first call.

    The machine code is kept beside the module or in the user's cache directory, if one of them can be written. It is
    made anew when the module changes, but not when a compiled function of another module that it calls does: then
    delete `__pycache__`.
    """
    if njit is None:
        return function
    try:
        return njit(cache=True)(function)
    except RuntimeError:  # there is no place for it
        return njit(function)
