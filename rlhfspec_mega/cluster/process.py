"""The driver's view of one worker process: its pending call, last answer, heartbeats and stacks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from rlhfspec_mega.cluster.interface import Answer, Call, WorkerSpec
from rlhfspec_mega.errors import RunError


class WorkerProcess(ABC):
    """A worker's process. Launchers implement how messages, heartbeats and stacks are transported.

    No method waits for the worker, except `kill`, for a bounded time. After `kill` all methods may still be called:
    messages and requests for stacks do nothing, the last heartbeat stays, and there is an exit reason.

    Attributes:
        pending: the call in progress, None if there is none.
        built: whether the first call, which builds the worker's object, succeeded; None before its answer.
    """

    def __init__(self, role: str, rank: int, spec: WorkerSpec, log: Path) -> None:
        self.role, self.rank, self.spec, self.log = role, rank, spec, log
        self.pending: Call | None = None
        self.built: bool | None = None
        self._answered: tuple[str, float] | None = None  # method and time of the last answer

    @abstractmethod
    def post(self, message: tuple[Any, ...]) -> None:
        """Send a message without waiting.

        First (import path, arguments) of the object to build, then (method, arguments).

        Bytes that the socket does not take are sent while the cluster waits for answers. A dead worker raises nothing
        here.
        """

    @abstractmethod
    def last_beat(self) -> float:
        """Time of the last heartbeat, in seconds of this process's time.monotonic()."""

    @abstractmethod
    def exit_reason(self) -> str | None:
        """How the process ended ("exit status -9") or why it is considered dead; None while it runs."""

    @abstractmethod
    def ask_stacks(self) -> None:
        """Request its Python stacks; a stopped process is continued for this, since it is about to be ended."""

    @abstractmethod
    def stacks(self) -> str:
        """The requested stacks, as far as they have arrived."""

    @abstractmethod
    def kill(self) -> None:
        """End the process and its children, and wait a few seconds for it; safe to call twice."""

    def start(self, method: str, message: tuple[Any, ...]) -> Call:
        """Start a call. Raises RunError if another one is pending."""
        if self.pending is not None:
            raise RunError(
                f"{self.role} rank {self.rank} is still busy with {self.pending.method}, asked for {method}."
            )
        self.pending = Call(self.role, self.rank, method, time.monotonic(), str(self.log))
        self.post(message)
        return self.pending

    def answered(self, answer: Answer) -> None:
        """Record the answer to the pending call."""
        if self.pending is None:
            return
        if self.built is None:
            self.built = answer[0] == "ok"
        self._answered = (self.pending.method, time.monotonic())
        self.pending.answer, self.pending = answer, None

    def last_thing(self) -> str:
        """What the worker is doing, or did last, in words."""
        now = time.monotonic()
        words = []
        if self.pending is not None:
            words.append(f"{self.pending.method} since {now - self.pending.sent:.1f} s")
        elif self._answered is not None:
            words.append(f"idle since {self._answered[0]}, {now - self._answered[1]:.1f} s ago")
        words.append(f"last sign of life {max(0.0, now - self.last_beat()):.1f} s ago")
        return ", ".join(words)
