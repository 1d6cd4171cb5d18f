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
    """Compile a function over numbers and arrays at its first call; the machine code is kept beside the module."""
    return njit(cache=True)(function) if njit is not None else function
