"""The report of a hang: what each worker did last, and the Python stacks of all of them and of the driver."""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from rlhfspec_mega.cluster.liveness import Liveness
from rlhfspec_mega.cluster.process import WorkerProcess

COLLECT_SECONDS = 2.0  # longest wait for the stacks of all workers
_POLL_SECONDS = 0.05


def write_report(log_dir: Path, processes: Sequence[WorkerProcess], liveness: Liveness) -> Path:
    """Write logs/stacks-<n>.txt; returns its path. Stopped processes are continued for it."""
    doing = [process.last_thing() for process in processes]  # before they are woken
    running = [process for process in processes if process.exit_reason() is None]
    for process in running:
        process.ask_stacks()
    end, before = time.monotonic() + COLLECT_SECONDS, [""]
    # Stacks arrive line by line: complete when all are there and none has grown.
    while time.monotonic() < end and not (all(before) and before == [process.stacks() for process in running]):
        before = [process.stacks() for process in running]
        time.sleep(_POLL_SECONDS)
    path = next(path for n in count(1) if not (path := log_dir / f"stacks-{n}.txt").exists())
    with path.open("w", encoding="utf-8") as file:
        for process, last in zip(processes, doing, strict=True):
            state = liveness.health(process.role, process.rank).state
            file.write(f"== {process.role} rank {process.rank}: {state}; {last}\n")
            ended = process.exit_reason()
            missing = f"no stacks: it ended with {ended}" if ended else "no stacks: it did not react"
            file.write((process.stacks() or missing).rstrip() + "\n\n")
        file.write("== driver\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
    return path
