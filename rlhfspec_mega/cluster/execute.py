"""The worker's side of a call, under any launcher: build the object, run a method, answer with plain data."""

from __future__ import annotations

import contextlib
import importlib
import traceback
from collections.abc import Callable
from typing import Any

from rlhfspec_mega.cluster.interface import Answer
from rlhfspec_mega.errors import RunError, UserError


class Executor:
    """Holds the worker's object, which the first message builds; later messages are (method, args)."""

    def __init__(self) -> None:
        self._worker: Any = None

    def execute(self, message: tuple[Any, ...]) -> Answer:
        """Execute a message and return the answer; never raises."""
        if self._worker is not None:
            method, args = message
            return _answer(lambda: getattr(self._worker, method)(*args))
        kind, result = _answer(lambda: _build(*message))
        if kind == "ok":
            self._worker, result = result, None
        return kind, result


def _build(import_path: str, arguments: dict[str, Any]) -> Any:
    module, _, name = import_path.rpartition(".")
    return getattr(importlib.import_module(module), name)(**arguments)


def _answer(work: Callable[[], Any]) -> Answer:
    try:
        return "ok", work()
    except UserError as error:
        return "user_error", str(error)
    except RunError as error:
        return "error", str(error)
    except Exception as error:
        with contextlib.suppress(OSError):  # the disk that the log is on may be full
            traceback.print_exc()
        first_line = next(iter(str(error).strip().splitlines()), "")
        return "error", f"{type(error).__name__}: {first_line}"
