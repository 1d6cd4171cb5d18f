"""Scores samples in a supervised process, so that a reward function that hangs costs one sample and not the run."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.reward.score import RewardScore
from rlhfspec_mega.types import Sample

START_SECONDS = 120.0  # longest time the import of a reward function may take

logger = logging.getLogger(__name__)


class _WorkerHung(Exception):
    """No answer within the time limit."""


class RewardRunner:
    """Runs the reward function named by `path` as function(prompt, response, answer, **arguments).

    The function returns a RewardScore or a plain number (exact from 1 upward). It is imported once, in a separate
    process. A sample that takes longer than `time_limit` seconds gets the value 0: the process is killed and restarted,
    whatever the function is doing. Not thread-safe.

    Attributes:
        timeouts: samples that hit the time limit since the start.

    Raises:
        UserError: the path cannot be imported or is no callable.
    """

    def __init__(self, path: str, time_limit: float = 5.0, arguments: Mapping[str, Any] | None = None) -> None:
        if time_limit <= 0:
            raise UserError(f"reward.time_limit={time_limit} must be above 0 seconds.")
        self.path = path
        self.time_limit = time_limit
        self.arguments = dict(arguments or {})
        self.timeouts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._start()

    def score(self, samples: Sequence[Sample]) -> list[RewardScore]:
        """Scores in the order of the samples.

        Raises:
            UserError: the function raised, returned no finite number, or ended its process; the sample is named.
        """
        scores: list[RewardScore] = []
        slow: list[str] = []
        while len(scores) < len(samples):
            rest = samples[len(scores) :]
            try:
                self._score_until_hang(rest, scores)
            except _WorkerHung:
                slow.append(samples[len(scores)].sample_id)
                scores.append(RewardScore(0.0, False))
                self.close()
        if slow:
            self.timeouts += len(slow)
            logger.warning(
                "Reward %s took longer than %g s (reward.time_limit) on %d of %d samples, which get 0: %s",
                *(self.path, self.time_limit, len(slow), len(samples), ", ".join(slow[:5]) + ", ..." * (len(slow) > 5)),
            )
        return scores

    def close(self) -> None:
        """End the process and its children. A later `score` starts it again."""
        if self._process is None or self._connection is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
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

    def _score_until_hang(self, samples: Sequence[Sample], scores: list[RewardScore]) -> None:
        """Append one score per sample; on _WorkerHung, the next sample in line is the one that hangs."""
        connection = self._connection or self._start()
        sample = samples[0]
        try:
            connection.send([(sample.prompt.text, sample.response, sample.prompt.answer) for sample in samples])
            for sample in samples:
                kind, result = self._receive(self.time_limit)
                if kind == "failed":
                    raise self._failure(sample, result)
                scores.append(result)
        except (EOFError, OSError):
            raise self._failure(sample, f"ended its process ({self._exit_status()})") from None

    def _receive(self, seconds: float) -> tuple[str, Any]:
        assert self._connection is not None
        if not self._connection.poll(seconds):
            raise _WorkerHung
        kind, result = self._connection.recv()
        return kind, result

    def _failure(self, sample: Sample, what: str) -> UserError:
        self.close()
        return UserError(
            f"The reward function {self.path} {what} on sample {sample.sample_id} "
            f"(prompt {sample.prompt.text[:80]!r}, response {sample.response[:80]!r}); correct one of them."
        )

    def _exit_status(self) -> str:
        assert self._process is not None
        try:
            status = self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
