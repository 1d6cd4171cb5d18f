"""Main module of a local worker process: builds one object and executes calls on it until the driver goes away."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from rlhfspec_mega.errors import RunError, UserError

_PR_SET_PDEATHSIG = 1


def _die_with_parent(parent: int) -> None:
    """Ask Linux for SIGKILL when the driver dies, so that no worker outlives it even inside a collective."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def _build(import_path: str, arguments: dict[str, Any]) -> Any:
    module, _, name = import_path.rpartition(".")
    return getattr(importlib.import_module(module), name)(**arguments)


def _execute(worker: Any, method: str, args: tuple[Any, ...]) -> tuple[str, Any]:
    return _answer(lambda: getattr(worker, method)(*args))


def _answer(work: Callable[[], Any]) -> tuple[str, Any]:
    """(kind, payload): ("ok", result), ("user_error", sentence) or ("error", what went wrong, in one line)."""
    try:
        return "ok", work()
    except UserError as error:
        return "user_error", str(error)
    except RunError as error:
        return "error", str(error)
    except Exception as error:
        traceback.print_exc()
        first_line = next(iter(str(error).strip().splitlines()), "")
        return "error", f"{type(error).__name__}: {first_line}"


def serve(connection: Connection) -> None:
    """Answer the driver: the first message builds the worker, the others are (method, args)."""
    worker: Any = None
    while True:
        try:
            message = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        if worker is None:
            kind, worker = _answer(partial(_build, *message))
            answer: tuple[str, Any] = (kind, worker if kind != "ok" else None)
        else:
            answer = _execute(worker, *message)
        connection.send_bytes(pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL))


def main() -> None:
    _die_with_parent(int(sys.argv[2]))
    # Ctrl-C reaches the driver alone, which ends its workers; SIGUSR1 writes the Python stacks into the log.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    serve(Connection(int(sys.argv[1])))
    # Skip the interpreter's shutdown: threads of gloo or CUDA may wait for peers that are gone.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
