"""Loads a user's functions by import path."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


class BadImportPath(Exception):
    """A sentence fragment that says what is wrong with an import path."""


def load_function(path: str) -> Callable[..., Any]:
    """The function that package.module.function names.

    Raises:
        BadImportPath: there is no such module or function, or its import fails.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise BadImportPath("is not an import path such as package.module.function")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise BadImportPath(f"cannot be imported: there is no module {error.name}") from error
    except Exception as error:
        raise BadImportPath(f"cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if function is None:
        raise BadImportPath(f"does not exist: module {module_name} has no {name}")
    if not callable(function):
        raise BadImportPath("is not callable")
    return function
