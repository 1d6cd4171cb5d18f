"""Which workers are alive and may be given work: a state machine without clock, threads or processes of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum


class WorkerState(StrEnum):
    """State of a worker process as far as the driver can tell."""

    STARTING = "starting"  # launched; has not yet reported that its object is built
    REJOINING = "rejoining"  # alive, without weights or with old ones
    SERVING = "serving"
    SUSPECT = "suspect"  # silent for longer than suspect_seconds
    DEAD = "dead"


@dataclass(frozen=True)
class Health:
    """What is known of one worker.

    Attributes:
        heard: time of its last heartbeat or answer.
        needs_weights: works only with the current policy's weights (engines; not actor ranks, which make them).
        version: policy version that it confirmed last.
        resumes: state that a SUSPECT worker returns to when it is heard again; None in every other state.
        why: how a DEAD worker ended, e.g. "exit status -9" or "silent for 61 s".
    """

    state: WorkerState
    heard: float
    needs_weights: bool
    version: int | None = None
    resumes: WorkerState | None = None
    why: str = ""

    @property
    def underlying(self) -> WorkerState:
        """The state without suspicion: that of the worker before it became SUSPECT."""
        return self.resumes or self.state

    def _becomes(self, state: WorkerState) -> Health:
        return replace(self, resumes=state) if self.resumes else replace(self, state=state)

    def may_serve(self, version: int | None) -> bool:
        """Whether it may work with policy `version`: it needs no weights, or has confirmed this version."""
        return not self.needs_weights or (self.version is not None and self.version == version)

    def heard_at(self, now: float) -> Health:
        """After a heartbeat; a DEAD worker stays DEAD."""
        if self.state is WorkerState.DEAD:
            return self
        return replace(self, state=self.underlying, resumes=None, heard=max(self.heard, now))

    def judged(self, now: float, suspect_seconds: float, dead_seconds: float) -> Health:
        """After its silence up to `now`."""
        silence = now - self.heard
        if self.state in (WorkerState.STARTING, WorkerState.DEAD) or silence <= suspect_seconds:
            return self
        if silence > dead_seconds:
            return self.ended(f"silent for {silence:.0f} s")
        return replace(self, state=WorkerState.SUSPECT, resumes=self.underlying)

    def ended(self, why: str) -> Health:
        """After its process has ended or was declared dead; the first cause is kept."""
        if self.state is WorkerState.DEAD:
            return self
        return replace(self, state=WorkerState.DEAD, resumes=None, why=why)

    def published(self, version: int) -> Health:
        """After `version` has become the current policy."""
        if self.may_serve(version) or self.underlying is not WorkerState.SERVING:
            return self
        return self._becomes(WorkerState.REJOINING)

    def confirmed(self, version: int, current: int | None) -> Health:
        """After it has confirmed all weights of `version`."""
        if self.underlying in (WorkerState.STARTING, WorkerState.DEAD):  # sent by a process that has ended since
            return self
        health = replace(self, version=version)
        return health._becomes(WorkerState.SERVING if health.may_serve(current) else WorkerState.REJOINING)


class Liveness:
    """The record of all workers of a run by (role, rank). Times are seconds of one monotonic clock.

    | event     | from                   | to                                                                |
    |-----------|------------------------|-------------------------------------------------------------------|
    | launched  | unknown, DEAD          | STARTING                                                          |
    | started   | STARTING               | SERVING; REJOINING if it needs weights                            |
    | heard     | SUSPECT                | the state it was in before, changed as said below                 |
    | look      | all but STARTING, DEAD | SUSPECT after suspect_seconds of silence, DEAD after dead_seconds |
    | exited    | any                    | DEAD                                                              |
    | publish   | SERVING                | REJOINING if it needs weights and confirmed another version       |
    | confirm   | REJOINING, SERVING     | SERVING with the current version, REJOINING with another one      |
    | forget    | any                    | unknown                                                           |

    `look` compares the silence of all workers with the limits. A SUSPECT worker stays SUSPECT under publish and
    confirm; they change the state in which it goes on once it is heard. Only `confirm` makes a REJOINING worker serve,
    never `publish`: an update that broke off may have overwritten part of the version it had confirmed. So an update
    begins with `publish` and ends with each engine's `confirm`.

    What workers report (started, heard, exited, confirm) is ignored where it comes too late, from a DEAD or forgotten
    worker; others that do not fit raise RuntimeError. Reports carry no mark of the process that sent them: after a
    restart, those still on their way from the process before must not be passed on. All waiting reports must be passed
    on before `look`: otherwise workers seem silent for as long as the driver itself paused.

    Args:
        suspect_seconds: silence after which a worker gets no new work.
        dead_seconds: silence after which it is given up; longer than suspect_seconds.

    Attributes:
        version: the policy version of now; None before the first `publish`.
    """

    def __init__(self, suspect_seconds: float, dead_seconds: float) -> None:
        if not 0 < suspect_seconds < dead_seconds:
            raise ValueError(f"0 < suspect_seconds ({suspect_seconds}) < dead_seconds ({dead_seconds}) must hold")
        self._suspect_seconds, self._dead_seconds = suspect_seconds, dead_seconds
        self._workers: dict[tuple[str, int], Health] = {}
        self.version: int | None = None

    def launched(self, role: str, rank: int, now: float, *, needs_weights: bool) -> None:
        """A process was started for a worker that is new, forgotten or DEAD. Raises RuntimeError in any other state."""
        known = self._workers.get((role, rank))
        if known is not None and known.state is not WorkerState.DEAD:
            raise RuntimeError(f"{role} rank {rank} is {known.state}: only a new or dead worker can be launched")
        self._workers[role, rank] = Health(WorkerState.STARTING, now, needs_weights)

    def started(self, role: str, rank: int, now: float) -> None:
        """The worker has built its object. Raises RuntimeError if it had reported that before."""
        known = self._workers.get((role, rank))
        if known is None or known.state is WorkerState.DEAD:
            return
        if known.state is not WorkerState.STARTING:
            raise RuntimeError(f"{role} rank {rank} is {known.state}: only a starting worker can report its start")
        state = WorkerState.REJOINING if known.needs_weights else WorkerState.SERVING
        self._workers[role, rank] = replace(known, state=state)
        self.heard(role, rank, now)

    def heard(self, role: str, rank: int, now: float) -> None:
        """A heartbeat or answer of the worker."""
        self._report(role, rank, lambda health: health.heard_at(now))

    def look(self, now: float) -> list[tuple[str, int]]:
        """Judge every worker by its silence; returns the (role, rank) that became DEAD by it, sorted."""
        dead = []
        for key, health in self._workers.items():
            after = health.judged(now, self._suspect_seconds, self._dead_seconds)
            if after.state is WorkerState.DEAD and health.state is not WorkerState.DEAD:
                dead.append(key)
            self._workers[key] = after
        return sorted(dead)

    def exited(self, role: str, rank: int, why: str) -> None:
        """The worker's process ended; `why` is kept unless it was DEAD before."""
        self._report(role, rank, lambda health: health.ended(why))

    def publish(self, version: int) -> None:
        """`version` is the current policy from now on.

        After a return to a checkpoint, publish that checkpoint's version before training continues: later version
        numbers will be used again for other weights.
        """
        self.version = version
        self._workers = {key: health.published(version) for key, health in self._workers.items()}

    def confirm(self, role: str, rank: int, version: int) -> None:
        """The engine holds all weights of `version`."""
        self._report(role, rank, lambda health: health.confirmed(version, self.version))

    def forget(self, role: str) -> None:
        """All workers of the role were ended on purpose."""
        self._workers = {key: health for key, health in self._workers.items() if key[0] != role}

    def health(self, role: str, rank: int) -> Health:
        """What is known of the worker. Raises RuntimeError if it was never launched, or forgotten."""
        if (role, rank) not in self._workers:
            raise RuntimeError(f"{role} rank {rank} is not in the record of workers")
        return self._workers[role, rank]

    def ranks(self, role: str, *states: WorkerState) -> list[int]:
        """Sorted ranks of the role in any of these states; with no states, all."""
        return sorted(
            rank
            for (known, rank), health in self._workers.items()
            if known == role and (not states or health.state in states)
        )

    def _report(self, role: str, rank: int, transition: Callable[[Health], Health]) -> None:
        if (role, rank) in self._workers:
            self._workers[role, rank] = transition(self._workers[role, rank])
