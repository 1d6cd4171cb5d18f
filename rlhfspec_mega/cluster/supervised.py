"""The part of a cluster that all launchers share: calls, waits with deadlines, heartbeats, restarts, stack reports."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhfspec_mega.cluster.interface import Background, Call, WorkerSpec
from rlhfspec_mega.cluster.liveness import Liveness, WorkerState
from rlhfspec_mega.cluster.process import WorkerProcess
from rlhfspec_mega.cluster.restarts import Restarts
from rlhfspec_mega.cluster.stacks import write_report
from rlhfspec_mega.errors import RunError, UserError, WorkerDied

logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.5  # between looks at signs of life and exits while waiting
_START = "start"  # the name of the first call, which builds the worker's object


class Group:
    """The workers of one role; `interface.WorkerGroup`."""

    def __init__(self, cluster: SupervisedCluster, role: str, size: int) -> None:
        self.role, self.size = role, size
        self._cluster = cluster

    def start(self, rank: int, method: str, *args: Any) -> Call:
        call = self._cluster.process(self.role, rank).start(method, (method, args))
        call.launch = self.launches(rank)
        return call

    def call(self, method: str, *args: Any, phase: str, ranks: Sequence[int] | None = None) -> list[Any]:
        chosen = range(self.size) if ranks is None else ranks
        return self._finish([self.start(rank, method, *args) for rank in chosen], phase)

    def scatter(self, method: str, arguments: Sequence[tuple[Any, ...]], phase: str) -> list[Any]:
        return self._finish([self.start(rank, method, *args) for rank, args in enumerate(arguments)], phase)

    def share(self, value: Any) -> Any:
        return self._cluster.share(value)

    def ranks(self, *states: WorkerState) -> list[int]:
        return self._cluster.liveness.ranks(self.role, *states)

    def serving(self) -> list[int]:
        return self.ranks(WorkerState.SERVING)

    def alive(self) -> list[int]:
        return self.ranks(WorkerState.SERVING, WorkerState.SUSPECT)

    def launches(self, rank: int) -> int:
        return self._cluster.launches[self.role, rank]

    def still_there(self, call: Call) -> bool:
        return call.launch == self.launches(call.rank) and call.rank not in self.ranks(WorkerState.DEAD)

    def confirm(self, rank: int, version: int) -> None:
        self._cluster.liveness.confirm(self.role, rank, version)

    def _finish(self, calls: list[Call], phase: str) -> list[Any]:
        self._cluster.wait(calls, phase)
        return [call.result() for call in calls]


class SupervisedCluster(ABC):
    """A cluster; subclasses start processes and carry messages.

    Args:
        log_dir: one log file per worker, and the stack reports.
        call_timeout: longest wait for any answer.
        start_timeout: longest wait for workers to start.
        heartbeat_timeout: a worker without a heartbeat for this long is declared dead.
        max_restarts: restarts of one worker, or of one role as a whole, between two finished steps.

    Attributes:
        liveness: the state of every worker.
        launches: processes started so far, by role and rank.
    """

    host_address = "127.0.0.1"  # where listeners of this process bind; every worker can reach it
    grace_seconds = 2.0  # after a failure: how long the death that may have caused it takes to be seen

    def __init__(
        self, log_dir: Path, *, call_timeout: float, start_timeout: float, heartbeat_timeout: float, max_restarts: int
    ) -> None:
        self.log_dir = log_dir
        self._deadline, self._start_seconds = call_timeout, start_timeout
        self.liveness = Liveness(heartbeat_timeout / 3, heartbeat_timeout)
        self._restarts = Restarts(max_restarts)
        self._processes: dict[tuple[str, int], WorkerProcess] = {}
        self.launches: Counter[tuple[str, int]] = Counter()
        self._replaceable: dict[str, bool] = {}  # roles, and whether they need the policy's weights
        self._together: dict[str, int] = {}  # workers of a replica, by role
        self._next_watch = 0.0
        self._background: Background | None = None
        self._up = False  # after the first start: before it, a failure to start ends the run
        log_dir.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def spawn(self, role: str, rank: int, spec: WorkerSpec, log: Path) -> WorkerProcess:
        """Start a process that builds the worker of this spec when the first message arrives."""

    @abstractmethod
    def receive(self, processes: Sequence[WorkerProcess], seconds: float) -> None:
        """Store the answers that these processes have sent with their calls; wait up to `seconds` for the first answer.

        The call of a process that has ended is answered with ("dead", how it ended).
        """

    def share(self, value: Any) -> Any:
        """See interface.WorkerGroup.share. Where messages carry arrays without copies, the value itself."""
        return value

    # Groups

    def launch(
        self,
        role: str,
        workers: Sequence[WorkerSpec],
        *,
        replaceable: bool = False,
        needs_weights: bool = True,
        together: int = 1,
    ) -> Group:
        if replaceable:
            self._replaceable[role], self._together[role] = needs_weights, together
        for rank, spec in enumerate(workers):
            self._start(role, rank, spec)
        return Group(self, role, len(workers))

    def wait_started(self) -> None:
        self._watch(_START, at_once=True)
        calls = [p.pending for p in self._processes.values() if p.pending and self._starting(p)]
        # Once the run is up, it continues without a replaceable worker that fails to restart.
        self.wait(calls, _START, seconds=self._start_seconds, check=not self._up)
        for call in calls:
            if call.role not in self._replaceable:
                call.result()
        self._up = True
        self._watch(_START, at_once=True)

    def process(self, role: str, rank: int) -> WorkerProcess:
        """The current process of this rank."""
        return self._processes[role, rank]

    def publish(self, version: int) -> None:
        self.liveness.publish(version)

    def settle(self, role: str, seconds: float) -> None:
        calls = [p.pending for p in self._processes.values() if p.role == role and p.pending and not self._starting(p)]
        end = time.monotonic() + seconds
        while (busy := [call for call in calls if not call.done]) and time.monotonic() < end:
            self.receive([self.process(call.role, call.rank) for call in busy], end - time.monotonic())
        for call in busy:
            if not call.done:  # by the end of a peer
                self._record_death(self.process(call.role, call.rank), f"being stuck in {call.method}")

    def end(self, role: str) -> None:
        for key in [key for key in self._processes if key[0] == role]:
            self._processes.pop(key).kill()
        self.liveness.forget(role)

    def progressed(self) -> None:
        self._restarts.refill()

    def may_restart(self, role: str) -> bool:
        return self._restarts.take(role)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
        self._processes.clear()

    # Waiting

    def wait(
        self,
        calls: Sequence[Call],
        phase: str,
        *,
        first: bool = False,
        seconds: float | None = None,
        check: bool = True,
    ) -> list[Call]:
        limit = self._deadline if seconds is None else seconds
        for call in calls:
            call.phase = phase
        while True:
            self._watch(phase)
            finished = [call for call in calls if call.done]
            if any(call.error for call in finished):
                self._see_causes(calls, phase)
                finished = [call for call in calls if call.done]
                if check:
                    self._raise_failure(finished)
            waiting = [call for call in calls if not call.done]
            if not waiting or (first and finished):
                return finished
            left = min(call.sent for call in waiting) + limit - time.monotonic()
            if left <= 0:
                self._judge_late(waiting, phase, limit, check)
                continue
            starting = [process for process in self._processes.values() if self._starting(process)]
            holders = [self.process(call.role, call.rank) for call in (*waiting, *self._attend(phase))]
            self.receive([*holders, *starting], min(WATCH_SECONDS, left))

    @contextmanager
    def beside(self, work: Background) -> Iterator[None]:
        before, self._background = self._background, work
        try:
            yield
        finally:
            self._background = before

    def _attend(self, phase: str) -> list[Call]:
        """Deliver answers that have arrived to the work in the background; returns its calls without an answer."""
        work, self._background = self._background, None  # it may itself wait for something
        if work is None:
            return []
        try:
            calls = work.calls()
            for call in calls:
                call.phase = phase
            if any(call.error for call in calls):
                self._see_causes(calls, phase)
            work.handle_answers([call for call in calls if call.done])
            waiting = [call for call in work.calls() if not call.done]
            self._judge_late(waiting, phase, self._deadline, check=False)
            return waiting
        finally:
            self._background = work

    def _judge_late(self, waiting: Sequence[Call], phase: str, limit: float, check: bool) -> None:
        """Apply _overdue to those of these calls that have exceeded their deadline."""
        late = [call for call in waiting if call.sent + limit <= time.monotonic()]
        end = time.monotonic() + self.grace_seconds  # unread since long ago, or a long answer?
        while (silent := [call for call in late if not call.done]) and (left := end - time.monotonic()) > 0:
            self.receive([self.process(call.role, call.rank) for call in silent], left)
        if late := [call for call in late if not call.done]:
            self._overdue(late, phase, limit, check)

    def _see_causes(self, calls: Sequence[Call], phase: str) -> None:
        """Peers of a dead rank fail too, with less telling errors and maybe earlier.

        Wait briefly for the death itself.
        """
        self._watch(phase, at_once=True)
        end = time.monotonic() + self.grace_seconds
        while time.monotonic() < end and not any(call.dead for call in calls):
            waiting = [self.process(call.role, call.rank) for call in calls if not call.done]
            if not waiting and all(call.error is None or isinstance(call.error, UserError) for call in calls):
                return
            self.receive(waiting, min(0.1, end - time.monotonic()))
            self._watch(phase, at_once=True)

    @staticmethod
    def _raise_failure(finished: Sequence[Call]) -> None:
        errors = [call.error for call in finished if call.error]
        for kind in (WorkerDied, UserError, RunError):
            for error in errors:
                if isinstance(error, kind):
                    raise error

    def _overdue(self, waiting: Sequence[Call], phase: str, limit: float, check: bool) -> None:
        """Declare late replaceable workers dead if the caller handles failures.

        Otherwise raise, naming the silent ranks.
        """
        silent = sorted((self.process(call.role, call.rank) for call in waiting), key=lambda p: p.last_beat())
        who = "; ".join(f"{process.role} rank {process.rank} ({process.last_thing()})" for process in silent)
        report = self._report()  # wakes stopped workers
        if not check and all(call.role in self._replaceable for call in waiting):
            for call in waiting:
                if not call.done:  # by the end of a peer
                    self._record_death(
                        self.process(call.role, call.rank), f"no answer within {limit:g} s (stacks: {report})"
                    )
            return
        raise RunError(
            f"In phase '{phase}', no answer within {limit:g} s from {who}. The Python stacks of all workers are in "
            f"{report}. Raise launcher.call_timeout if the work is just slow."
        )

    # Watching

    def look(self, phase: str, calls: Sequence[Call] = ()) -> None:
        for call in calls:
            call.phase = phase
        self._watch(phase)
        if waiting := [self.process(call.role, call.rank) for call in calls if not call.done]:
            self.receive(waiting, 0.0)
        self._raise_failure([call for call in calls if call.done])

    def _watch(self, phase: str, *, at_once: bool = False) -> None:
        """Process heartbeats, exits and silence; raise if a worker is lost that cannot be replaced.

        Args:
            at_once: even if the last check was a moment ago.
        """
        now = time.monotonic()
        if now < self._next_watch and not at_once:
            return
        self._next_watch = now + WATCH_SECONDS
        for process in list(self._processes.values()):
            if self._is_current(process):  # it may have been ended with a peer just now
                self._watch_one(process, now)
        if silent := [self.process(role, rank) for role, rank in self.liveness.look(now)]:
            self._fell_silent(silent, phase)
        for process in self._processes.values():
            if self._is_dead(process) and process.role not in self._replaceable:
                raise WorkerDied(self._death(process, phase))

    def _watch_one(self, process: WorkerProcess, now: float) -> None:
        why = process.exit_reason()
        if self._is_dead(process):
            process.answered(("dead", self.liveness.health(process.role, process.rank).why))
        elif why is not None:
            if process.pending:
                self.receive([process], 0.0)  # an answer may have come before the end
            self._record_death(process, why)
        elif process.built:
            self._note_life(process)
        elif self._up and process.role in self._replaceable:
            if process.built is False:
                self._record_death(process, "an error while starting")
            elif process.pending and now - process.pending.sent > self._start_seconds:
                self._record_death(process, f"not being up within {self._start_seconds:g} s")

    def _note_life(self, process: WorkerProcess) -> None:
        health = self.liveness.health(process.role, process.rank)
        if health.state is WorkerState.STARTING:
            self.liveness.started(process.role, process.rank, time.monotonic())
        self.liveness.heard(process.role, process.rank, max(health.heard, process.last_beat()))

    def _fell_silent(self, silent: Sequence[WorkerProcess], phase: str) -> None:
        """Raise for a silent worker that cannot be replaced: a restart would hide the cause."""
        vital = [process for process in silent if process.role not in self._replaceable]
        who = "; ".join(f"{process.role} rank {process.rank} ({process.last_thing()})" for process in vital)
        report = self._report()  # wakes stopped workers
        if vital:
            raise RunError(
                f"In phase '{phase}', no sign of life from {who}. The Python stacks of all workers are in {report}. "
                "Raise launcher.heartbeat_timeout if it was only busy."
            )
        for process in filter(self._is_current, silent):
            why = self.liveness.health(process.role, process.rank).why
            self._record_death(process, f"no sign of life ({why}; stacks: {report})")

    def _record_death(self, process: WorkerProcess, why: str) -> None:
        """Record a worker's death, fail its pending call, and start another process if that is allowed.

        The other workers of its replica are ended and restarted, too.
        """
        role, size = process.role, self._together.get(process.role, 1)
        first = process.rank - process.rank % size
        for peer in [self.process(role, rank) for rank in range(first, first + size)]:
            reason = why if peer is process else f"rank {process.rank}, its peer, which had {why}"
            self.liveness.exited(role, peer.rank, reason)
            peer.answered(("dead", reason))
            peer.kill()
        if role not in self._replaceable:
            return
        again = self._up and self._restarts.take(f"{role} {first}")
        logger.warning("%s", self._death(process, "") + (" Another is starting." if again else " It stays down."))
        if again:
            for rank in range(first, first + size):
                self._start(role, rank, self.process(role, rank).spec)

    def _death(self, process: WorkerProcess, phase: str) -> str:
        why = self.liveness.health(process.role, process.rank).why
        where = f"In phase '{phase}', " if phase else ""
        return f"{where}{process.role} rank {process.rank} died with {why}; its log is {process.log}."

    def _start(self, role: str, rank: int, spec: WorkerSpec) -> None:
        process = self.spawn(role, rank, spec, self.log_dir / f"{role}-{rank}.log")
        self._processes[role, rank] = process
        self.launches[role, rank] += 1
        self.liveness.launched(role, rank, time.monotonic(), needs_weights=self._replaceable.get(role, False))
        numbered = {"launch": self.launches[role, rank]} if spec.numbered else {}
        process.start(_START, (spec.import_path, spec.arguments | numbered))

    def _starting(self, process: WorkerProcess) -> bool:
        return process.pending is not None and process.pending.method == _START

    def _is_current(self, process: WorkerProcess) -> bool:
        return self._processes.get((process.role, process.rank)) is process

    def _is_dead(self, process: WorkerProcess) -> bool:
        return self.liveness.health(process.role, process.rank).state is WorkerState.DEAD

    def _report(self) -> Path:
        return write_report(self.log_dir, list(self._processes.values()), self.liveness)
