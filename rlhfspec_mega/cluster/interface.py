"""What the rest of the system knows of workers: groups, calls in flight, and waits that always end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlhfspec_mega.errors import RunError


@dataclass(frozen=True)
class WorkerSpec:
    """One worker to start: `import_path` names a class, `arguments` are its keyword arguments.

    `devices` are the device indices it may see (CUDA_VISIBLE_DEVICES on GPUs, nothing on CPUs).
    """

    import_path: str
    arguments: dict[str, Any] = field(default_factory=dict)
    devices: tuple[int, ...] = ()


class Call(Protocol):
    """A method call in flight on one worker."""

    role: str
    rank: int
    method: str

    @property
    def done(self) -> bool: ...

    def result(self) -> Any:
        """The method's return value; call only when done."""


class WorkerGroup(Protocol):
    """The workers of one role. A worker executes one call at a time, in the order they came."""

    role: str
    size: int

    def start(self, rank: int, method: str, *args: Any) -> Call:
        """Begin a call on one worker. Raises RunError when the worker is dead or still busy."""

    def call(self, method: str, *args: Any, phase: str, ranks: Sequence[int] | None = None) -> list[Any]:
        """The same call on all (or these) workers; results in rank order."""

    def scatter(self, method: str, arguments: Sequence[tuple[Any, ...]], phase: str) -> list[Any]:
        """One call per worker, each with its own arguments; results in rank order."""


class Cluster(Protocol):
    """Starts worker groups and waits for them."""

    def launch(self, role: str, workers: Sequence[WorkerSpec]) -> WorkerGroup:
        """Begin to start a group, beside others; `wait_started` must follow before its first call."""

    def wait_started(self) -> None:
        """Wait until every worker has built its object. Raises UserError or RunError."""

    def wait(
        self, calls: Sequence[Call], phase: str, *, first: bool = False, seconds: float | None = None
    ) -> list[Call]:
        """Wait for all calls (or the first); the finished ones.

        Raises:
            UserError: a worker raised one.
            RunError: a worker failed, died, or did not answer in `seconds` (default: the cluster's deadline); the
                message names phase, role and ranks.
        """

    def close(self) -> None:
        """End every worker; safe to call twice."""


def failure(phase: str, role: str, rank: int, method: str, what: str, log: str) -> RunError:
    """The error of one worker as a sentence."""
    return RunError(f"In phase '{phase}', {role} rank {rank} {what} (during {method}); its log is {log}.")
