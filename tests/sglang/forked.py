"""SGLang's processes, forked from one that has imported SGLang: of a start's 20 CPU seconds, imports take 14.

The process that they are forked from is their parent, to which SGLang's processes report a crash; it ignores that. The
tests' process notices by SGLang's watchdog, within a second.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from types import SimpleNamespace
from typing import Any

import pytest

IMPORTED = ["tests.sglang.imported"]  # found from the working directory: the server has no other path


class ForkedProcess(ForkServerProcess):
    """With the environment of the process that starts it, not of the one that it is forked from."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


def fork_processes(patch: pytest.MonkeyPatch) -> None:
    """Have SGLang start its processes so from now on, on a CPU; it would start each in a fresh interpreter."""
    from sglang.srt.entrypoints import engine

    multiprocessing.set_forkserver_preload(IMPORTED)
    forkserver.ensure_running()  # here: later its socket would lie in an engine's directory
    replaced = SimpleNamespace(
        Process=ForkedProcess, Pipe=multiprocessing.Pipe, set_start_method=lambda method, force: None
    )
    patch.setattr(engine, "mp", replaced)
