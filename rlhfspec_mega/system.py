"""All processes of one run, started together, and the few things the algorithm asks of them."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from rlhfspec_mega.actor.draft_learning import DraftLearning
from rlhfspec_mega.actor.rendezvous import Rendezvous
from rlhfspec_mega.cluster.interface import WorkerSpec
from rlhfspec_mega.cluster.launchers import make_cluster, transport
from rlhfspec_mega.cluster.liveness import WorkerState
from rlhfspec_mega.cluster.meeting_point import MeetingPoint
from rlhfspec_mega.config.hardware import device_type
from rlhfspec_mega.config.reach import weight_transport
from rlhfspec_mega.config.schema import RunConfig
from rlhfspec_mega.config.sglang import engine_gpus, engines_sleep, memory_share, uses_sglang
from rlhfspec_mega.config.sizes import Sizes
from rlhfspec_mega.drafting.trainer import RefreshReport
from rlhfspec_mega.errors import RunError
from rlhfspec_mega.models.draft_directory import draft_tensors, load_target_ids, read_draft_shape, write_draft
from rlhfspec_mega.models.hf_directory import write_directory
from rlhfspec_mega.models.mapping import mapping_for
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.observe.timeline import Timeline
from rlhfspec_mega.planning.consolidation import Consolidator
from rlhfspec_mega.planning.lengths import LengthPredictor
from rlhfspec_mega.planning.placement import ACTOR, ENGINE, place
from rlhfspec_mega.planning.reallocation import Reallocator
from rlhfspec_mega.planning.rollout_state import MigrationCost
from rlhfspec_mega.planning.tail import TailPolicy
from rlhfspec_mega.resharding.controller import Resharder
from rlhfspec_mega.rollout.assignment import held_at_once
from rlhfspec_mega.rollout.manager import RolloutManager
from rlhfspec_mega.rollout.reallocation import FIRST_DOWNTIME, Reallocation, ScoringWork
from rlhfspec_mega.types import WeightTarget
from rlhfspec_mega.workers.actor_group import ActorGroup
from rlhfspec_mega.workers.freed_refresh import FreedRefresh
from rlhfspec_mega.workers.scoring import ReferenceSettings

LEARNT_FILE = "learnt.json"
SETTLE_SECONDS = 10.0  # how long an engine may take to come back from a call when the actor has died
_PAUSE_SECONDS = 0.1


class System:
    """Actor ranks and engines with resharding between them. A context manager: leaving it ends every process.

    Args:
        run_dir: worker logs go to its `logs`.
        total_updates: optimizer steps to come, for the learning-rate schedule.
        model: directory that the actor starts from; SGLang reads its shape there.
        draft: directory of the draft to start from; None: engines decode plainly.
        reference: directory of the model that engines score with; None: they do not.
        with_engines: a replay of saved rollouts needs none.
        timeline: is told what the engines do.

    Attributes:
        actor: log-probs, updates, checkpoints.
        rollout: generation; only with engines.
        policy_version: of the weights the engines hold.
    """

    actor: ActorGroup
    rollout: RolloutManager

    def __init__(
        self,
        config: RunConfig,
        sizes: Sizes,
        shape: ModelShape,
        run_dir: Path,
        *,
        total_updates: int,
        model: Path | None = None,
        draft: Path | None = None,
        reference: Path | None = None,
        with_engines: bool = True,
        timeline: Timeline | None = None,
    ) -> None:
        self._config, self._sizes, self._shape = config, sizes, shape
        self._model, self._draft = model, draft
        self._reference, self._timeline = reference, timeline
        self._total_updates, self._with_engines = total_updates, with_engines
        self._learnt_file = run_dir / LEARNT_FILE
        self._lengths = LengthPredictor(config.rollout.max_new_tokens)
        self._device = device_type(config.cluster)
        gpus = engine_gpus(config)
        self._places = place(config.placement.mode, sizes.devices, sizes.actor_ranks, sizes.engines, gpus)
        self._sleeps = engines_sleep(config)
        self._cluster = make_cluster(config.cluster, run_dir / "logs", self._places, use_gpus=self._device == "cuda")
        self._meeting_point: MeetingPoint | None = None
        self._resharder: Resharder | None = None
        self._steps_done = 0
        self.policy_version = -1
        self._draft_version = 0
        self._freed_refresh: FreedRefresh | None = None
        self._draft_holders: set[tuple[int, int]] = set()  # engines, by rank and launch, that hold this version

    def __enter__(self) -> System:
        try:
            self._start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _start(self) -> None:
        if self._with_engines:
            self._engines = self._cluster.launch(ENGINE, self._engine_specs(), replaceable=True)
        self._start_actor()
        if self._with_engines:
            self._freed_refresh = self._new_freed_refresh() if self._reallocates("adaptive") else None
            self.rollout = RolloutManager(
                self._engines,
                self._cluster.wait,
                revive=self._revive,
                poll_seconds=self._config.rollout.poll_seconds,
                deterministic=self._config.trainer.deterministic,
                at_once=held_at_once(self._config.rollout.slots) if self._reallocates("queue") else None,
                reallocation=self._reallocation() if self._reallocates("adaptive") else None,
                scored_at_once=self._config.trainer.max_tokens_per_microbatch,
                timeline=self._timeline,
                freed_work=self._freed_refresh,
            )

    def _reallocates(self, policy: str) -> bool:
        """Whether this policy is at work: under trainer.deterministic assignment is fixed."""
        return self._config.reallocation.policy == policy and not self._config.trainer.deterministic

    def _reallocation(self) -> Reallocation:
        options, scoring, cost = self._config.reallocation, ScoringWork(), MigrationCost(FIRST_DOWNTIME, 0.0)
        policy = TailPolicy(
            Reallocator(cost, least_gain=options.least_gain, cool_down=options.cool_down),
            Consolidator(cost, tolerance=options.tolerance) if self._reference else None,
            scoring.seconds,
        )
        if known := self._load_learnt("lengths"):
            with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
                self._lengths.load_state_dict(known)
        return Reallocation(policy, self._lengths, self._config.rollout.poll_seconds, scoring, policy.learn_cost)

    def _new_freed_refresh(self) -> FreedRefresh | None:
        drafting = self._config.drafting
        if self._draft is None or not drafting.refresh_every:
            return None
        (device,) = self._places[ACTOR][self.actor.draft_rank]
        return FreedRefresh(
            lambda seconds: self.actor.start_refresh(seconds), device, self._places[ENGINE], drafting.refresh_seconds
        )

    def _start_actor(self) -> None:
        config = self._config
        self._meeting_point = MeetingPoint(self._cluster.host_address, config.cluster.deadline_seconds)
        actor = self._cluster.launch(ACTOR, self._actor_specs(self._meeting_point.address))
        self._cluster.wait_started()
        self.actor = ActorGroup(actor, config.actor, config.trainer.max_tokens_per_microbatch)
        self._resharder = Resharder(
            self._cluster,
            actor,
            mapping_for(self._shape.architecture).hf_tensors(self._shape, config.actor.dtype),
            open_host=transport(weight_transport(config), self._cluster, config.cluster.deadline_seconds),
            bucket_bytes=int(config.resharding.bucket_mib * 2**20),
            device=self._device if config.placement.mode == "separate" else "cpu",
        )
        if self._draft is not None:
            self._start_draft(self._draft, self._resharder)

    def _start_draft(self, path: Path, resharder: Resharder) -> None:
        """Hold the start draft beside the actor; the next reshard brings it to the engines."""
        drafting = self._config.drafting
        learning = DraftLearning(
            buffer_tokens=drafting.buffer_tokens,
            learning_rate=drafting.learning_rate,
            temperature=self._config.rollout.temperature,
            seed=self._config.seed,
            recent_only=self._config.trainer.deterministic,
        )
        self.actor.start_draft(path, learning if drafting.refresh_every else None)
        tensors = draft_tensors(read_draft_shape(path, self._shape))
        resharder.plan(WeightTarget.DRAFT, [replace(info, dtype=self._engine_dtype) for info in tensors])
        self._draft_changed()

    def _actor_specs(self, meeting_point: str) -> list[WorkerSpec]:
        return [
            WorkerSpec(
                "rlhfspec_mega.workers.actor.ActorWorker",
                {
                    "shape": self._shape,
                    "config": self._config.actor,
                    "rendezvous": Rendezvous(
                        meeting_point, rank, self._sizes.actor_ranks, self._config.cluster.deadline_seconds
                    ),
                    "device": self._device,
                    "seed": self._config.seed,
                    "temperature": self._config.rollout.temperature,
                    "total_updates": self._total_updates,
                    "deterministic": self._config.trainer.deterministic,
                },
                devices,
            )
            for rank, devices in enumerate(self._places[ACTOR])
        ]

    def _engine_specs(self) -> list[WorkerSpec]:
        arguments: dict[str, Any] = {
            "shape": self._shape,
            "config": self._config.rollout,
            "dtype": self._engine_dtype,
            "device": self._device,
            "deterministic": self._config.trainer.deterministic,
        }
        if self._reference is not None:
            arguments["reference"] = ReferenceSettings(
                self._reference,
                self._config.actor.dtype,
                self._config.rollout.temperature,
                self._config.trainer.max_tokens_per_microbatch,
                self._config.actor.logprob_chunk,
            )
        if self._draft is not None:
            arguments |= {"draft": self._draft, "drafting": self._config.drafting}
        if uses_sglang(self._config):
            kind = "rlhfspec_mega.workers.sglang.SGLangEngineWorker"
            arguments |= {"model": self._model, "memory": memory_share(self._config), "sleeps": self._sleeps}
        else:
            kind = "rlhfspec_mega.workers.engine.TorchEngineWorker"
            arguments |= {"seed": self._config.seed, "drafting_state": self._load_learnt("drafting")}
        return [WorkerSpec(kind, arguments, devices) for devices in self._places[ENGINE]]

    @property
    def _engine_dtype(self) -> str:
        return self._config.rollout.dtype or self._config.actor.dtype

    def reshard(self, version: int) -> None:
        """Give every engine that runs the actor's weights as policy `version`; restarted ones join with it.

        The draft, if there is one, follows where an engine does not hold it as it is now.

        Raises RunError when no engine is left.
        """
        assert self._resharder is not None
        self._cluster.publish(version)
        self.policy_version = version
        while not self._resharder.update(self._engines, self._ready_engines(), version):
            pass
        if self._draft is not None:
            self._send_draft(self._resharder)

    def rest_engines(self) -> None:
        """Engines that can do so give their GPU memory back until the next reshard."""
        if self._sleeps:
            calls = [self._engines.start(rank, "sleep") for rank in self._engines.serving()]
            self._cluster.wait(calls, "sleep", check=False)
            for call in calls:
                if not call.dead:  # a dead one is started anew before the next reshard
                    call.result()

    def allow_freed_refresh(self) -> None:
        """The draft may be refreshed during the rollout to come, where that frees the device of the draft's rank."""
        if self._freed_refresh:
            self._freed_refresh.allow()

    def take_freed_refresh(self) -> RefreshReport | None:
        """The refresh made during the last rollout, once it has ended; None without one."""
        report = self._freed_refresh.take(self._cluster.wait) if self._freed_refresh else None
        if report and report.kept:
            self._draft_changed()
        return report

    def refresh_draft(self, *, steps: int | None = None, seconds: float | None = None) -> RefreshReport:
        """Train the draft on the actor's recent samples, by count or by time; if kept, the next reshard brings it."""
        report = self.actor.refresh_draft(steps=steps, seconds=seconds)
        if report.kept:
            self._draft_changed()
        return report

    def save_learnt(self) -> None:
        """Write what was learnt of costs, acceptance and lengths beside the run's results, for a resumed run.

        Raises OSError where it cannot be written.
        """
        serving = self._engines.serving()[:1]
        if not serving:
            return
        learnt: dict[str, Any] = {"lengths": self._lengths.state_dict()}
        if self._draft is not None:
            call = self._engines.start(serving[0], "drafting_state")
            self._cluster.wait([call], "checkpoint", check=False)
            learnt["drafting"] = None if call.dead else call.result()
        partial = self._learnt_file.with_suffix(".partial")
        partial.write_text(json.dumps(learnt) + "\n", encoding="utf-8")
        partial.replace(self._learnt_file)

    def _load_learnt(self, what: str) -> Any:
        """What an earlier run of this directory has learnt; a file that cannot be read is as good as none."""
        if not self._config.trainer.resume:
            return None
        try:
            return json.loads(self._learnt_file.read_text(encoding="utf-8"))[what]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _draft_changed(self) -> None:
        self._draft_version += 1
        self._draft_holders.clear()

    def _send_draft(self, resharder: Resharder) -> None:
        """Bring the draft to the engines that serve, unless all of them hold it."""
        serving = self._engines.serving()
        if not {(rank, self._engines.launches(rank)) for rank in serving} <= self._draft_holders:
            held = resharder.update(self._engines, serving, self._draft_version, WeightTarget.DRAFT)
            self._draft_holders = {(rank, self._engines.launches(rank)) for rank in held}

    def _ready_engines(self) -> list[int]:
        ready = (WorkerState.REJOINING, WorkerState.SERVING)
        while not (ranks := self._engines.ranks(*ready)):
            if not self._engines.ranks(WorkerState.STARTING, WorkerState.SUSPECT):
                raise RunError(
                    f"No engine is left: each died more than cluster.max_restarts={self._config.cluster.max_restarts} "
                    f"times in one step; see {self._cluster.log_dir}."
                )
            self._cluster.wait_started()
            time.sleep(_PAUSE_SECONDS)  # a suspect one comes back or is given up
        return ranks

    def _revive(self) -> None:
        """Bring engines back in the middle of a rollout, when none is left to finish it."""
        if self._freed_refresh:
            self._freed_refresh.settle(self._cluster.wait)
        self.reshard(self.policy_version)

    def may_restart_actor(self) -> bool:
        """Count a restart of the actor; False when there were too many without progress."""
        return self._cluster.may_restart(ACTOR)

    def restart_actor(self) -> None:
        """Start the actor's ranks anew after one has died; they begin without weights.

        Engines go on running, but forget the samples they held.
        """
        self._cluster.end(ACTOR)
        if self._freed_refresh:
            self._freed_refresh.forget()
        self._close_connections()
        self._cluster.settle(ENGINE, SETTLE_SECONDS)
        self._start_actor()
        calls = [self._engines.start(rank, "clear") for rank in self._engines.alive()]
        self._cluster.wait(calls, "restart actor", seconds=SETTLE_SECONDS, check=False)  # the dead hold nothing

    def step_done(self, steps: int) -> None:
        """Tell that so many steps are done: beyond any before, it is the progress that allows new restarts."""
        if steps > self._steps_done:
            self._steps_done = steps
            self._cluster.progressed()

    def export(self, path: Path, source: Path) -> None:
        """Write the actor's weights as a Hugging Face directory, with the tokenizer of `source`."""
        assert self._resharder is not None
        write_directory(path, self._shape, self._resharder.stream(), source)

    def export_draft(self, path: Path) -> None:
        """Write the draft, as it is now, as a directory that drafting.path takes."""
        assert self._resharder is not None and self._draft is not None
        shape = read_draft_shape(self._draft, self._shape)
        tensors = {name: tensor.clone() for name, tensor in self._resharder.stream(WeightTarget.DRAFT)}
        write_draft(path, shape, tensors, load_target_ids(self._draft, shape))

    def _close_connections(self) -> None:
        if self._resharder is not None:
            self._resharder.close()
        if self._meeting_point is not None:
            self._meeting_point.close()

    def _close(self) -> None:
        self._cluster.close()
        self._close_connections()
