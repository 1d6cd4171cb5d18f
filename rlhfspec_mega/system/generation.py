"""The generation side: the engine workers and the rollout manager over them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from rlhfspec_mega.cluster.interface import WorkerSpec
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.sglang import memory_share, uses_sglang
from rlhfspec_mega.config.speculation import recalls
from rlhfspec_mega.planning.lengths import LengthPredictor
from rlhfspec_mega.planning.placement import ENGINE
from rlhfspec_mega.planning.reallocation import Reallocator
from rlhfspec_mega.planning.rollout_state import MigrationCost
from rlhfspec_mega.planning.tail import Consolidator, TailPolicy
from rlhfspec_mega.rollout.earlier_texts import EarlierTexts
from rlhfspec_mega.rollout.manager import RolloutManager, Wait
from rlhfspec_mega.rollout.reallocation import FIRST_DOWNTIME, Reallocation, ScoringWork
from rlhfspec_mega.rollout.session import EnginePool, FreedWork
from rlhfspec_mega.system.setup import Setup, engine_worker


def engine_specs(setup: Setup, drafting_state: Any) -> list[WorkerSpec]:
    """Specifications of the engine workers.

    Args:
        drafting_state: learnt models of an earlier torch engine, or None.
    """
    config = setup.config
    arguments: dict[str, Any] = {
        "shape": setup.shape,
        "config": config.rollout,
        "dtype": setup.engine_dtype,
        "device": setup.device,
        "deterministic": config.trainer.deterministic,
    }
    if setup.draft is not None:
        arguments |= {"draft": setup.draft, "drafting": config.speculation}
    if recalls(config):
        arguments |= {"drafting": config.speculation, "history_tokens": config.speculation.history_tokens}
    if uses_sglang(config):
        memory = memory_share(config, setup.placement)
        arguments |= {"model": setup.model, "memory": memory, "sleeps": setup.engines_sleep}
    else:
        arguments["drafting_state"] = drafting_state
    return [WorkerSpec(engine_worker(config), arguments, devices) for devices in setup.placement.devices(ENGINE)]


def reallocates(config: RunConfig, policy: str) -> bool:
    """Whether samples are reallocated: never under trainer.deterministic, where each sample has a fixed engine."""
    return config.reallocation.policy == policy and not config.trainer.deterministic


def make_manager(
    setup: Setup,
    engines: EnginePool,
    wait: Wait,
    revive: Callable[[], None],
    lengths: LengthPredictor,
    freed_work: FreedWork | None,
    timeline: Any,
) -> RolloutManager:
    """The rollout manager of a run; for the arguments see RolloutManager."""
    config = setup.config
    on_demand = reallocates(config, "queue") or reallocates(config, "adaptive")
    return RolloutManager(
        engines,
        wait,
        revive=revive,
        poll_seconds=config.rollout.poll_interval,
        deterministic=config.trainer.deterministic,
        slots=config.rollout.max_running_requests if on_demand else None,
        reallocation=_reallocation(setup, lengths) if reallocates(config, "adaptive") else None,
        timeline=timeline,
        freed_work=freed_work,
    )


def earlier_texts(config: RunConfig, engines: EnginePool, wait: Wait) -> EarlierTexts:
    """What the engines of a run draft from besides the samples that they decode."""
    tokens = config.speculation.history_tokens if recalls(config) else 0
    return EarlierTexts(engines, wait, tokens, config.trainer.deterministic)


def _reallocation(setup: Setup, lengths: LengthPredictor) -> Reallocation:
    options, scoring, cost = setup.config.reallocation, ScoringWork(), MigrationCost(FIRST_DOWNTIME, 0.0)
    policy = TailPolicy(
        Reallocator(cost, least_gain=options.least_gain, cool_down=options.cool_down),
        Consolidator(cost, tolerance=options.tolerance) if setup.fuses_scoring else None,
        scoring.seconds,
    )
    return Reallocation(policy, lengths, setup.config.rollout.poll_interval, scoring, policy.learn_cost)


def length_predictor(config: RunConfig, known: Any) -> LengthPredictor:
    """Predictor of response lengths from saved state; unreadable state is ignored."""
    lengths = LengthPredictor(config.rollout.max_new_tokens)
    if known:
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            lengths.load_state_dict(known)
    return lengths
