"""What the rest of the system knows of workers: groups, calls in flight, and waits that always end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlhfspec_mega.cluster.liveness import WorkerState
from rlhfspec_mega.errors import RunError, UserError, WorkerDied

# What a worker answers: ("ok", result), ("user_error", sentence), ("error", one line); or what became of it: ("dead",
# how it ended).
Answer = tuple[str, Any]


@dataclass(frozen=True)
class WorkerSpec:
    """One worker to start: `import_path` names a class, `arguments` are its keyword arguments.

    `devices` are the device indices of the cluster it may use (CUDA_VISIBLE_DEVICES on GPUs, a place on CPUs).
    With `numbered` the class is also told, as `launch`, how often a process was started for this rank, this one
    included: peers that start anew together meet under another name than the ones before.
    """

    import_path: str
    arguments: dict[str, Any] = field(default_factory=dict)
    devices: tuple[int, ...] = ()
    numbered: bool = False


@dataclass(eq=False)
class Call:
    """A method call on one worker; `sent` in seconds of time.monotonic(), `launch` tells processes of a rank apart."""

    role: str
    rank: int
    method: str
    sent: float
    log: str
    phase: str = ""
    launch: int = 0
    answer: Answer | None = None

    @property
    def done(self) -> bool:
        return self.answer is not None

    @property
    def dead(self) -> bool:
        """Whether the worker ended, or was given up, before it answered."""
        return self.answer is not None and self.answer[0] == "dead"

    @property
    def error(self) -> UserError | RunError | None:
        """What a finished call failed with."""
        if self.answer is None or self.answer[0] == "ok":
            return None
        kind, payload = self.answer
        if kind == "user_error":
            return UserError(payload)
        if kind == "dead":
            return WorkerDied(self._sentence(f"died with {payload}"))
        return RunError(self._sentence(f"failed with {payload.strip().splitlines()[-1]}"))

    def result(self) -> Any:
        """The method's return value; raises the call's error. Only when done."""
        if self.answer is None:
            raise RuntimeError(f"{self.method} on {self.role} rank {self.rank} has not answered yet")
        if error := self.error:
            raise error
        return self.answer[1]

    def _sentence(self, what: str) -> str:
        where = f"In phase '{self.phase}', " if self.phase else ""
        return f"{where}{self.role} rank {self.rank} {what} (during {self.method}); its log is {self.log}."


class WorkerGroup(Protocol):
    """The workers of one role. A worker executes one call at a time, in the order they came."""

    role: str
    size: int

    def start(self, rank: int, method: str, *args: Any) -> Call:
        """Begin a call on one worker. Raises RunError when it is still busy; a dead one answers that it is."""

    def call(self, method: str, *args: Any, phase: str, ranks: Sequence[int] | None = None) -> list[Any]:
        """The same call on all (or these) workers; results in rank order."""

    def scatter(self, method: str, arguments: Sequence[tuple[Any, ...]], phase: str) -> list[Any]:
        """One call per worker, each with its own arguments; results in rank order."""

    def share(self, value: Any) -> Any:
        """An argument, in place of `value`, for calls on several workers: it travels once to each node, or not at all.

        The value must not change until the calls have ended.
        """

    def ranks(self, *states: WorkerState) -> list[int]:
        """Ranks in one of these states now."""

    def serving(self) -> list[int]:
        """Ranks that may be given work."""

    def alive(self) -> list[int]:
        """Ranks that hold what they were given, a suspect one included."""

    def launches(self, rank: int) -> int:
        """How often a process was started for this rank: tells a restarted worker from the one before it."""

    def still_there(self, call: Call) -> bool:
        """Whether the process that a call went to lives and holds its rank: what it answered is true of the rank."""

    def confirm(self, rank: int, version: int) -> None:
        """Record that a worker holds the weights of this policy version."""


class Background(Protocol):
    """Work on replaceable workers that goes on while the driver waits for something else; rollout.session is one."""

    def calls(self) -> Sequence[Call]:
        """In flight."""

    def handle_answers(self, calls: Sequence[Call]) -> None:
        """Process calls that were answered or whose workers have died; may start other calls."""


class Cluster(Protocol):
    """Starts worker groups, watches them and waits for them.

    Attributes:
        host_address: where listeners of this process bind; every worker can reach it.
    """

    host_address: str

    def launch(
        self,
        role: str,
        workers: Sequence[WorkerSpec],
        *,
        replaceable: bool = False,
        needs_weights: bool = True,
        together: int = 1,
    ) -> WorkerGroup:
        """Begin to start a group, beside others; `wait_started` must follow before its first call.

        Args:
            replaceable: a worker that dies is started again by the cluster; the death of any other worker ends
                whatever is waited for.
            needs_weights: a replaceable worker serves only with the current policy's weights.
            together: so many replaceable workers, from a multiple of it on, are one replica of a model: when one dies,
                all are ended and started anew.
        """

    def wait_started(self) -> None:
        """Wait until every worker has built its object. Raises UserError or RunError."""

    def wait(
        self,
        calls: Sequence[Call],
        phase: str,
        *,
        first: bool = False,
        seconds: float | None = None,
        check: bool = True,
    ) -> list[Call]:
        """Wait for all calls (or the first); the finished ones.

        Args:
            seconds: longest time from the start of a call to its answer; default: the cluster's deadline.
            check: raise what a call failed with; otherwise failures stay in the calls, and a replaceable worker that
                passes the deadline is given up.

        Raises:
            UserError: a worker raised one.
            WorkerDied: a worker of these calls died, or any that is not replaceable.
            RunError: a worker failed, went silent or did not answer in time; phase, role, ranks and the last thing
                each did are named, and the Python stacks of all workers are in a file.
        """

    def beside(self, work: Background) -> AbstractContextManager[None]:
        """Inside, every wait also attends to this work: what it raises ends the wait."""

    def look(self, phase: str, calls: Sequence[Call] = ()) -> None:
        """Take note of exits, silence and answers to these calls, and raise what a wait would; returns at once."""

    def publish(self, version: int) -> None:
        """Say which policy version is current: workers that need weights serve again once they confirmed it."""

    def settle(self, role: str, seconds: float) -> None:
        """Wait until no worker of a role is busy; end those that are not idle in time."""

    def end(self, role: str) -> None:
        """End all workers of a role, so that it can be launched anew."""

    def progressed(self) -> None:
        """A step was finished: every worker may be restarted anew."""

    def may_restart(self, role: str) -> bool:
        """Count a restart of a whole role; whether there may be one more."""

    def close(self) -> None:
        """End every worker; safe to call twice."""
