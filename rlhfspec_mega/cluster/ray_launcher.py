"""launcher=ray: workers are Ray actors in placement groups, on any number of nodes."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhfspec_mega.cluster.environment import worker_environment
from rlhfspec_mega.cluster.interface import WorkerSpec
from rlhfspec_mega.cluster.process import WorkerProcess
from rlhfspec_mega.cluster.ray_instance import RayInstance
from rlhfspec_mega.cluster.supervised import SupervisedCluster

# Where Ray is missing, ray_instance has said so.
# isort: split
import ray
from ray.exceptions import ObjectLostError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhfspec_mega.cluster.ray_attendant import Attendants
from rlhfspec_mega.cluster.ray_placement import Reservation, devices_of_bundle
from rlhfspec_mega.cluster.ray_worker import CONTROL, Identity, RayWorker, Stored

PING_SECONDS = 1.0  # between two pings of a worker that answers them
_AWAY_SECONDS = 3.0  # without looking: an answer may have come that this process had no time to take
_KILL_SECONDS = 5.0  # longest wait for a node to confirm that a worker was killed


class RayProcess(WorkerProcess):
    """A worker that runs as a Ray actor.

    It is sent one ping at a time, and counts as silent only while one is unanswered.
    """

    def __init__(self, role: str, rank: int, spec: WorkerSpec, log: Path, actor: Any, attendants: Attendants) -> None:
        super().__init__(role, rank, spec, log)
        self.reply: ray.ObjectRef | None = None  # of the pending call
        self._actor, self._attendants = actor, attendants
        self._identity: Identity | None = None
        self._end: str | None = None
        self._ping = actor.ping.remote()
        self._asked = self._heard = self._listened = time.monotonic()
        self._stacks: ray.ObjectRef | None = None
        self._killed = False

    def post(self, message: tuple[Any, ...]) -> None:
        self.reply = self._actor.execute.remote(message)

    def read(self) -> None:
        """Store the answer that has arrived with the call that waits for it."""
        assert self.reply is not None
        reply, self.reply = self.reply, None
        try:
            self.answered(ray.get(reply))
        except (RayTaskError, ObjectLostError) as error:  # the answer could not be pickled, or was lost on its way
            self.answered(("error", str(error)))
        except RayError as error:
            self._end = death(error)
            self.answered(("dead", self._end))

    def last_beat(self) -> float:
        self._listen()
        return self._heard

    def exit_reason(self) -> str | None:
        self._listen()
        return self._end

    def ask_stacks(self) -> None:
        self._listen()
        self._stacks = None
        if self._identity is not None and not self._killed:
            self._stacks = self._attendants.at(self._identity.node).stacks.remote(self._identity)

    def stacks(self) -> str:
        if self._stacks is None or not _ready(self._stacks):
            return ""
        with suppress(RayError):
            return ray.get(self._stacks)
        return ""

    def kill(self) -> None:
        if self._killed:
            return
        self._listen()
        self._killed, self._end, self._stacks = True, self._end or "being ended", None
        ray.kill(self._actor, no_restart=True)
        if self._identity is not None:  # Ray's way is not sure to reach a stopped process, or its children
            ray.wait([self._attendants.at(self._identity.node).end.remote(self._identity)], timeout=_KILL_SECONDS)

    def _listen(self) -> None:
        """Take the answer to the last ping and send another."""
        now = time.monotonic()
        if self._end is not None or self._killed:
            return
        if self._ping is not None and _ready(self._ping):
            try:
                self._identity = ray.get(self._ping)
            except RayError as error:
                self._end = death(error)
                return
            self._ping = None
        if self._ping is None or now - self._listened > _AWAY_SECONDS:
            self._heard = now
        if self._ping is None and now - self._asked >= PING_SECONDS:
            self._ping, self._asked = self._actor.ping.remote(), now
        self._listened = now


class RayCluster(SupervisedCluster):
    """Starts actors and ends every one of them, with the Ray instance where it is its own.

    Args:
        threads: CPUs of a worker, and threads of its computation.
        use_gpus: one GPU per device, shared by the workers on it, which see theirs by CUDA_VISIBLE_DEVICES.
        places: device indices of every rank of every role that will be launched, see Reservation.
        training_devices: how many of them lie on nodes for training, see Reservation.
        address: of a running Ray cluster; None: RAY_ADDRESS, else an own instance on this machine.
        supervision: log_dir, deadlines and limits; see SupervisedCluster.

    Raises:
        UserError: no such cluster, or it has too little.

    Attributes:
        host_address: where the driver should listen so that workers reach it.
    """

    def __init__(
        self,
        log_dir: Path,
        *,
        threads: int,
        use_gpus: bool,
        places: Mapping[str, Sequence[tuple[int, ...]]],
        address: str | None,
        training_devices: int | None = None,
        **supervision: Any,
    ) -> None:
        self._threads, self._use_gpus = threads, use_gpus
        each = devices_of_bundle(places)
        workers = Counter(devices[0] // each for ranks in places.values() for devices in ranks)
        gpus = len(workers) * each if use_gpus else 0
        self._instance = RayInstance(address, cpus=threads * workers.total(), gpus=gpus)
        self.host_address = self._instance.host_address
        try:
            self._reservation = Reservation(
                places,
                threads=threads,
                use_gpus=use_gpus,
                training_devices=training_devices,
                seconds=supervision["start_timeout"],
                where=self._instance.name,
            )
        except BaseException:
            self._instance.close()
            raise
        super().__init__(log_dir, **supervision)  # after all refusals, which leave no directory behind
        self._attendants = Attendants()
        for node in self._reservation.nodes():
            self._attendants.at(node)  # while there is time; it is needed when something hangs

    def spawn(self, role: str, rank: int, spec: WorkerSpec, log: Path) -> WorkerProcess:
        place = self._reservation.place(role, rank)
        environment = worker_environment(self._threads)
        if self._instance.own:
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        if not self._use_gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        elif place.visible is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(place.visible)
            environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"  # or Ray, asked for none, shows none
        actor = (
            ray.remote(concurrency_groups={CONTROL: 1})(RayWorker)  # type: ignore[call-overload]
            .options(
                num_cpus=self._threads,
                num_gpus=place.gpus,
                max_restarts=0,  # restarts are ours: they come with current weights
                scheduling_strategy=PlacementGroupSchedulingStrategy(place.group, place.bundle),
                runtime_env={"env_vars": environment},
            )
            .remote(str(log.resolve()), os.getcwd())
        )
        return RayProcess(role, rank, spec, log, actor, self._attendants)

    def share(self, value: Any) -> Stored:
        return Stored([ray.put(value)])

    def receive(self, processes: Sequence[WorkerProcess], seconds: float) -> None:
        by_reply = {p.reply: p for p in processes if isinstance(p, RayProcess) and p.reply is not None}
        if not by_reply:
            time.sleep(max(0.0, seconds))
            return
        replies = list(by_reply)
        ray.wait(replies, timeout=max(0.0, seconds))
        for reply in ray.wait(replies, num_returns=len(replies), timeout=0)[0]:
            by_reply[reply].read()

    def close(self) -> None:
        if not ray.is_initialized():
            return
        super().close()
        self._attendants.close()
        self._reservation.close()
        self._instance.close()


def death(error: RayError) -> str:
    """How an actor ended, in one line."""
    text = " ".join(str(error).split())
    found = re.search(r"Worker exit type: (\w+) Worker exit detail: (.+?)(?: Some common causes.*)?$", text)
    if found:
        return f"Ray's {found[1]}: {found[2].rstrip('.')}"
    return f"{type(error).__name__}: {str(error).strip().splitlines()[-1].strip().rstrip('.')}"


def _ready(reference: ray.ObjectRef) -> bool:
    return bool(ray.wait([reference], timeout=0)[0])
