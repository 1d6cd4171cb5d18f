"""numba where it is installed.

Without it the same functions run in Python, a hundred times slower; where `COMPILES` is asked for, torch computes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
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
    made anew when its module changes, or a module of this package that it imports, since functions and constants of
    others become part of it.
    """
    return _compiled(function, fastmath=False)


def vectorized(function: Function) -> Function:
    """As `compiled`, for loops over floats whose sums may be taken in any order; to divide by 0 is no error.

    Such a function calls only `inlined` ones, and if it adds up, only Python calls it: whether the compiler merges it
    with others depends on which of them were kept from earlier processes, and with that the order of sums. Equal runs
    would differ in the last bit.
    """
    return _compiled(function, fastmath=_REORDERED, error_model="numpy")


def inlined(function: Function) -> Function:
    """A function that becomes part of each compiled one that calls it."""
    return function if njit is None else njit(inline="always")(function)


def _compiled(function: Function, **options: Any) -> Function:
    if njit is None:
        return function
    try:
        made = njit(cache=True, **options)(function)
        # numba itself looks at the function's own file only. What is read here is not part of its interface.
        made._cache._cache_file._source_stamp = _digest(Path(function.__code__.co_filename), _described(options))
    except (RuntimeError, AttributeError):  # there is no place for it, or numba keeps it in another way
        return njit(**options)(function)
    return made


def _described(options: dict[str, Any]) -> str:
    """The same in every process: sets have another order in each."""
    return repr([(name, sorted(value) if isinstance(value, set) else value) for name, value in options.items()])


def _digest(file: Path, options: str) -> str:
    """Of a module's source, and of those in its package that it imports, at first or second hand."""
    found, waiting = set[Path](), [file]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += _imported(one)
    parts = (_text(one) for one in sorted(found))
    return hashlib.sha256("".join((options, *parts)).encode()).hexdigest()


@cache
def _text(file: Path) -> str:
    return file.read_text()


@cache
def _imported(file: Path) -> list[Path]:
    """Files of the modules that a module imports from its own package."""
    package = re.escape(__name__.split(".")[0])
    names = re.findall(rf"^from ({package}(?:\.\w+)*) import", _text(file), re.MULTILINE)
    places = [Path(__file__).parents[1].joinpath(*name.split(".")) for name in names]
    return [found for place in places for found in (place.with_suffix(".py"), place / "__init__.py") if found.is_file()]
