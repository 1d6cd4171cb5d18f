"""What the rest of the system knows of workers: groups, calls in flight, and waits with deadlines."""

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

    `devices` are indices of the cluster's devices that it may use (CUDA_VISIBLE_DEVICES on GPUs). With `numbered` the
    class also gets `launch`, the number of times a process was started for this rank, the current one included: ranks
    that restart together use it to rendezvous under a new name.
    """

    import_path: str
    arguments: dict[str, Any] = field(default_factory=dict)
    devices: tuple[int, ...] = ()
    numbered: bool = False


@dataclass(eq=False)
class Call:
    """A method call on one worker.

    `sent`: seconds of time.monotonic(); `launch`: the process of the rank it went to.
    """

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
        """Whether the worker ended, or was declared dead, before it answered."""
        return self.answer is not None and self.answer[0] == "dead"

    @property
    def error(self) -> UserError | RunError | None:
        """The exception of a failed call; None if it succeeded."""
        if self.answer is None or self.answer[0] == "ok":
            return None
        kind, payload = self.answer
        if kind == "user_error":
            return UserError(payload)
        if kind == "dead":
            return WorkerDied(self._sentence(f"died with {payload}"))
        return RunError(self._sentence(f"failed with {payload.strip().splitlines()[-1]}"))

    def result(self) -> Any:
        """The method's return value; raises the call's error. Only for finished calls."""
        if self.answer is None:
            raise RuntimeError(f"{self.method} on {self.role} rank {self.rank} has not answered yet")
        if error := self.error:
            raise error
        return self.answer[1]

    def _sentence(self, what: str) -> str:
        where = f"In phase '{self.phase}', " if self.phase else ""
        return f"{where}{self.role} rank {self.rank} {what} (during {self.method}); its log is {self.log}."


class WorkerGroup(Protocol):
    """The workers of one role. A worker executes one call at a time, in order of arrival."""

    role: str
    size: int

    def start(self, rank: int, method: str, *args: Any) -> Call:
        """Start a call on one worker. Raises RunError if it is still busy; a dead worker's call fails."""

    def call(self, method: str, *args: Any, phase: str, ranks: Sequence[int] | None = None) -> list[Any]:
        """The same call on all workers (or on these ranks); results in rank order."""

    def scatter(self, method: str, arguments: Sequence[tuple[Any, ...]], phase: str) -> list[Any]:
        """One call per worker, each with its own arguments; results in rank order."""

    def share(self, value: Any) -> Any:
        """A handle to pass instead of `value` to several workers: the value is transferred once per node at most.

        The value must not change until the calls have finished.
        """

    def ranks(self, *states: WorkerState) -> list[int]:
        """Ranks that are in one of these states."""

    def serving(self) -> list[int]:
        """Ranks that may be given new work."""

    def alive(self) -> list[int]:
        """Ranks whose processes hold their state, suspected ones included."""

    def launches(self, rank: int) -> int:
        """How many processes were started for this rank; tells a restarted worker from its predecessor."""

    def still_there(self, call: Call) -> bool:
        """Whether the process that received a call is alive and still holds its rank, so that its answer is valid."""

    def confirm(self, rank: int, version: int) -> None:
        """Record that a worker holds the weights of this policy version."""


class Background(Protocol):
    """Work on replaceable workers that continues while the driver waits for something else, such as rollout.session."""

    def calls(self) -> Sequence[Call]:
        """Calls in flight."""

    def handle_answers(self, calls: Sequence[Call]) -> None:
        """Process answered calls and those of dead workers; may start other calls."""


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
        """Start a group without waiting; `wait_started` must follow before its first call.

        Args:
            replaceable: the cluster restarts a worker that dies; the death of any other worker ends every wait.
            needs_weights: a replaceable worker gets work only when it holds the current policy's weights.
            together: number of consecutive replaceable workers that form one replica of a model: when one dies, all of
                them are ended and restarted.
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
        """Wait for all calls, or for the first one; returns the finished ones.

        Args:
            seconds: longest time from the start of a call to its answer; default: the cluster's deadline.
            check: raise the errors of failed calls; otherwise they stay in the calls, and a replaceable worker that
                exceeds the deadline is declared dead.

        Raises:
            UserError: a worker raised one.
            WorkerDied: a worker of these calls died, or one that is not replaceable.
            RunError: a worker failed, went silent or did not answer in time; the message names phase, role, ranks and
                what each did last, and the Python stacks of all workers are in a file.
        """

    def beside(self, work: Background) -> AbstractContextManager[None]:
        """Context in which every wait also serves this background work; its errors end the wait."""

    def look(self, phase: str, calls: Sequence[Call] = ()) -> None:
        """Without waiting, handle workers that exited or are silent, and answers; raises what a wait would."""

    def publish(self, version: int) -> None:
        """Set the current policy version: workers that need weights get work again once they have confirmed it."""

    def settle(self, role: str, seconds: float) -> None:
        """Wait until no worker of a role is busy; end those that are still busy after `seconds`."""

    def end(self, role: str) -> None:
        """End all workers of a role, so that it can be launched again."""

    def progressed(self) -> None:
        """A step has finished: counts of restarts begin anew."""

    def may_restart(self, role: str) -> bool:
        """Count a restart of a whole role; returns whether it is allowed."""

    def close(self) -> None:
        """End every worker; safe to call twice."""
