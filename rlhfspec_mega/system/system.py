"""All processes of one run, and the operations on them that the training loop needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rlhfspec_mega.cluster.launchers import make_cluster, transport
from rlhfspec_mega.config.reach import weight_transport
from rlhfspec_mega.config.sizes import training_devices
from rlhfspec_mega.config.speculation import recalls
from rlhfspec_mega.planning.placement import ACTOR, CRITIC, ENGINE, FROZEN, REFERENCE, REWARD
from rlhfspec_mega.rollout.manager import RolloutManager
from rlhfspec_mega.rollout.scoring import Scoring
from rlhfspec_mega.rollout.session import Session
from rlhfspec_mega.system.draft_refresh import DraftRefresh
from rlhfspec_mega.system.generation import earlier_texts, engine_specs, length_predictor, make_manager
from rlhfspec_mega.system.learnt import Learnt
from rlhfspec_mega.system.scorers import Scorers
from rlhfspec_mega.system.setup import Setup
from rlhfspec_mega.system.training import Training
from rlhfspec_mega.system.weights import WeightSync
from rlhfspec_mega.workers.fused_group import FusedGroup
from rlhfspec_mega.workers.model_group import ModelGroup

SETTLE_SECONDS = 10.0  # wait for an engine's answer after the actor has died


class System:
    """Megatron ranks, engines and the resharding between them; leaving the context manager ends every process.

    Args:
        timeline: observe.timeline.Timeline, which records what engines do.

    Attributes:
        rollout: the rollout manager; only with engines.
        scorers: the frozen models on generation devices; None if there are none or they lie elsewhere.
        draft: refreshes of the draft.
        texts: earlier samples, which engines draft from.
    """

    rollout: RolloutManager
    draft: DraftRefresh
    scorers: Scorers | None = None

    def __init__(self, setup: Setup, timeline: Any = None) -> None:
        self._setup, self._timeline, config = setup, timeline, setup.config
        self._cluster = make_cluster(
            config.cluster,
            config.launcher,
            setup.run_dir / "logs",
            setup.placement.processes(),
            use_gpus=setup.device == "cuda",
            training_devices=training_devices(config),
        )
        self._learnt = Learnt(setup.run_dir, config.trainer.resume)
        self._lengths = length_predictor(config, self._learnt.load("lengths"))
        self._training: Training | None = None
        self._steps_done = 0

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
        setup, config = self._setup, self._setup.config
        specs = engine_specs(setup, self._learnt.load("drafting")) if setup.with_engines else []
        self._engines = self._cluster.launch(ENGINE, specs, replaceable=True)
        self._weights = WeightSync(self._cluster, self._engines, config.launcher.max_restarts)
        self.scorers = Scorers(setup, self._cluster) if setup.fuses_scoring else None
        self._start_training()
        self.draft = DraftRefresh(setup, self._cluster, lambda: self.training.draft, self._weights.draft_changed)
        if setup.with_engines:
            self.rollout = make_manager(
                setup,
                self._engines,
                self._cluster.wait,
                self._revive,
                self._lengths,
                self.draft.freed,
                self._timeline,
            )
        self.texts = earlier_texts(config, self._engines, self._cluster.wait)

    def _start_training(self) -> None:
        config, cluster = self._setup.config, self._cluster
        open_host = transport(weight_transport(config), cluster, config.launcher.call_timeout)
        self._training = Training(self._setup, cluster, cluster.host_address, open_host)
        if self._training.draft is not None:
            self._weights.draft_changed()

    # The models

    @property
    def training(self) -> Training:
        """The current training ranks and their models."""
        assert self._training is not None, "a system is a context manager"
        return self._training

    @property
    def actor(self) -> ModelGroup:
        """Log-probs, updates, checkpoints."""
        return self.training.actor

    @property
    def critic(self) -> ModelGroup | None:
        """The value model; None without one."""
        return self.training.models.get(CRITIC)

    @property
    def fused(self) -> FusedGroup | None:
        """Actor and critic for updates in one pass; None if these are not possible."""
        return self.training.fused

    @property
    def learners(self) -> dict[str, ModelGroup]:
        """The models that learn, by name."""
        return {name: one for name, one in self.training.models.items() if one.description.learning is not None}

    @property
    def reference(self) -> ModelGroup | None:
        """The frozen reference on the actor's ranks; None if there is none or it lies on generation devices."""
        return self.training.models.get(REFERENCE)

    @property
    def reward_model(self) -> ModelGroup | None:
        """The reward model on the actor's ranks; None if there is none or it lies on generation devices."""
        return self.training.models.get(REWARD)

    @contextmanager
    def beside(self, session: Session) -> Iterator[None]:
        """Context in which engines continue a rollout while the driver waits for the actor or a frozen model.

        Meanwhile no refresh of the draft starts, and no batch for frozen models that share the actor's devices.
        """
        self.draft.disallow_freed()
        session.hold_scoring(not self.scores_beside_actor)
        try:
            with self._cluster.beside(session):
                yield
        finally:
            session.hold_scoring(False)

    @property
    def scores_beside_actor(self) -> bool:
        """Whether the frozen models have other devices than the actor."""
        return not any(self._setup.placement.share_device(ACTOR, model) for model in FROZEN)

    @contextmanager
    def scoring_beside(self, scoring: Scoring) -> Iterator[None]:
        """Context in which samples that are left are scored while the driver waits for the actor or the critic."""
        with self._cluster.beside(self.rollout.scoring_left(scoring)):
            yield

    # Weights

    @property
    def policy_version(self) -> int:
        """Policy version of the engines' weights."""
        return self._weights.policy_version

    def reshard(self, version: int) -> None:
        """See WeightSync.reshard. Engines that join get what the others draft from, too."""
        self._weights.reshard(self.training.resharder, version)
        self.texts.complete("reshard")

    def rest_engines(self) -> None:
        """Engines that can do so free their GPU memory until the next reshard."""
        if self._setup.engines_sleep:
            calls = [self._engines.start(rank, "sleep") for rank in self._engines.serving()]
            self._cluster.wait(calls, "sleep", check=False)
            for call in calls:
                if not call.dead:  # a dead engine is restarted before the next reshard
                    call.result()

    # What dies, and what stays

    def _revive(self) -> None:
        """Restart engines in the middle of a rollout when none is left to finish it."""
        if self.draft.freed:
            self.draft.freed.settle(self._cluster.wait)
        self.reshard(self.policy_version)

    def load_start_weights(self) -> None:
        """See Training.load_start_weights."""
        self.training.load_start_weights()

    def may_restart_actor(self) -> bool:
        """Count a restart of the actor; False if there were too many since the last finished step."""
        return self._cluster.may_restart(ACTOR)

    def restart_actor(self) -> None:
        """Restart the actor's ranks after one of them has died; their weights are not loaded yet.

        Engines stay up and drop the samples they hold.
        """
        self._cluster.end(ACTOR)
        if self.draft.freed:
            self.draft.freed.forget()
        self.training.close()
        for role in (ENGINE, *FROZEN):
            self._cluster.settle(role, SETTLE_SECONDS)
        self._start_training()
        calls = [self._engines.start(rank, "clear") for rank in self._engines.alive()]
        self._cluster.wait(
            calls, "restart actor", seconds=SETTLE_SECONDS, check=False
        )  # a dead engine holds no samples
        if self._setup.with_engines:
            self.rollout.take_tallies("restart actor")  # of samples that are decoded again

    def step_done(self, steps: int) -> None:
        """Record that this many steps are finished: a new maximum is progress, which allows new restarts."""
        if steps > self._steps_done:
            self._steps_done = steps
            self._cluster.progressed()

    def save_learnt(self) -> None:
        """Save learnt models of cost, acceptance and lengths for a resumed run.

        Raises OSError if they cannot be written.
        """
        serving = self._engines.serving()[:1]
        if not serving:
            return
        learnt: dict[str, Any] = {"lengths": self._lengths.state_dict()}
        if self.training.draft is not None or recalls(self._setup.config):
            call = self._engines.start(serving[0], "drafting_state")
            self._cluster.wait([call], "checkpoint", check=False)
            if call.dead:
                return  # what the last checkpoint saved stays
            learnt["drafting"] = call.result()
        self._learnt.save(learnt)

    def _close(self) -> None:
        self._cluster.close()
        if self._training is not None:
            self._training.close()
        if self.scorers is not None:
            self.scorers.close()
