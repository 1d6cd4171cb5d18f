"""Scores samples in a supervised process, so that a reward function that hangs costs one sample and not the run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.reward.score import FailureKind, RewardFailure, RewardScore
from rlhfspec_mega.types import Sample

START_SECONDS = 120.0  # longest time the import of a reward function may take


class _WorkerHung(Exception):
    """No answer within the time limit."""


class RewardRunner:
    """Runs the reward function named by `path` as function(prompt, response, answer, **arguments).

    The function returns a RewardScore or a plain number (exact from 1 upward). It is imported once, in a separate
    process. A sample that takes longer than `time_limit` seconds fails: the process is killed and restarted, whatever
    the function is doing. Not thread-safe.

    Raises:
        UserError: the path cannot be imported or is no callable.
    """

    def __init__(self, path: str, time_limit: float = 5.0, arguments: Mapping[str, Any] | None = None) -> None:
        if time_limit <= 0:
            raise UserError(f"reward.time_limit={time_limit} must be above 0 seconds.")
        self.path = path
        self.time_limit = time_limit
        self.arguments = dict(arguments or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._start()

    def score(self, samples: Sequence[Sample]) -> list[RewardScore | RewardFailure]:
        """Scores in the order of the samples.

        Raises:
            UserError: the function cannot be imported again after a failure.
        """
        scores: list[RewardScore | RewardFailure] = []
        while len(scores) < len(samples):
            try:
                self._score_until_failure(samples[len(scores) :], scores)
            except _WorkerHung:
                scores.append(
                    RewardFailure(FailureKind.TIMEOUT, f"took longer than {self.time_limit:g} s (reward.time_limit)")
                )
                self.close()
            except (EOFError, OSError):
                scores.append(RewardFailure(FailureKind.CRASH, f"ended its process ({self._exit_status()})"))
                self.close()
        return scores

    def kill(self) -> None:
        """Send the process and its children SIGKILL; another thread may be waiting for a score."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process and its children. A later `score` starts it again."""
        if self._process is None or self._connection is None:
            return
        self.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._connection.close()
        self._process = self._connection = None

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> Connection:
        ours, theirs = Pipe()
        self._connection = ours
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlhfspec_mega.reward.worker", str(theirs.fileno())],
            stdin=subprocess.PIPE,  # never written: it closes when this process dies, and the worker's watcher sees it
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
            start_new_session=True,
        )
        theirs.close()
        try:
            ours.send((self.path, self.arguments))
            kind, message = self._receive(START_SECONDS)
        except _WorkerHung:
            kind, message = "failed", f"was not imported within {START_SECONDS:g} s"
        except (EOFError, OSError):
            kind, message = "failed", f"ended its process on import ({self._exit_status()})"
        if kind != "ready":
            self.close()
            raise UserError(f"The reward function {self.path} {message}; correct reward.function.")
        return ours

    def _score_until_failure(self, samples: Sequence[Sample], scores: list[RewardScore | RewardFailure]) -> None:
        """Append one score per sample; when this raises, the next sample in line is the one that failed."""
        connection = self._connection or self._start()
        connection.send([(sample.prompt.text, sample.response, sample.prompt.answer) for sample in samples])
        for _ in samples:
            scores.append(self._receive(self.time_limit))

    def _receive(self, seconds: float) -> Any:
        assert self._connection is not None
        if not self._connection.poll(seconds):
            raise _WorkerHung
        return self._connection.recv()

    def _exit_status(self) -> str:
        assert self._process is not None
        try:
            status = self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
