"""Predicts the time of a training step, phase by phase, from the costs of its parts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhfspec_mega.config.frozen import frozen_home
from rlhfspec_mega.config.hardware import device_type
from rlhfspec_mega.config.logprob_pass import skips_logprob_pass
from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.config.sizes import Sizes
from rlhfspec_mega.models.shape import ModelShape
from rlhfspec_mega.planning.placement import ACTOR, ENGINE, GENERATION
from rlhfspec_mega.simulate.mechanisms import Mechanism, simulate
from rlhfspec_mega.simulate.rollout import SimulatedRollout
from rlhfspec_mega.simulate.step_costs import StepCosts, read_costs
from rlhfspec_mega.simulate.step_roofline import roofline_costs
from rlhfspec_mega.simulate.workload import Workload

PLANS = 25  # about so many plans are made in a simulated rollout; 100 change the predicted time by less than 1%


@dataclass(frozen=True)
class StepForecast:
    """Predicted times of a step.

    Attributes:
        seconds: by phase, named as in the metrics `timing_s/...`. What a phase does only every few steps counts with
            its share of a step. Evaluations, exports and checkpoints are not included.
        bound_by: by phase, what its time is bound by; only phases for which that is known.
        tokens: of prompts and responses in a step.
        source: see StepCosts.
    """

    seconds: Mapping[str, float]
    bound_by: Mapping[str, str]
    tokens: float
    source: Mapping[str, Any]

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def longest(self) -> str:
        """The phase that takes most of the step."""
        return max(self.seconds, key=lambda phase: self.seconds[phase])


def forecast_run(config: RunConfig, shape: ModelShape, sizes: Sizes) -> StepForecast | None:
    """Predict a step from measured costs (cluster.costs), else from the GPU's data sheet; None if there is neither.

    Raises UserError for a file of costs that cannot be read or was measured with other settings.
    """
    if config.cluster.costs:
        costs = read_costs(Path(config.cluster.costs))
        costs.check_for(config, config.cluster.costs)
    elif device_type(config.cluster) == "cuda" and config.cluster.gpu.bf16_tflops:
        costs = roofline_costs(config, shape, sizes)
    else:
        return None
    return forecast_step(config, sizes, costs)


def forecast_step(config: RunConfig, sizes: Sizes, costs: StepCosts) -> StepForecast:
    """Predict a step after the first: rollouts are simulated, the other phases follow from their tokens."""
    trainer = config.trainer
    groups, members = trainer.prompts_per_step, trainer.samples_per_prompt
    workloads = costs.lengths.draw(groups, members)
    rollouts = simulated_rollouts(config, sizes, costs, workloads[1:], workloads[:1])
    tokens = statistics.fmean(float(workload.totals.sum()) for workload in workloads[1:])
    of_replica = tokens / sizes.data_parallel
    seconds = {
        "generate": costs.rollout_start + costs.stretch * statistics.median(one.makespan for one in rollouts),
        "score": costs.reward * sizes.samples_per_step,
    }
    passes = 0.0 if skips_logprob_pass(config, sizes) else costs.logprob_passes
    seconds["logprobs"] = passes * costs.logprobs * of_replica
    seconds["values"] = costs.values * of_replica
    seconds["reference"] = 0.0
    home = frozen_home(config)
    if home == GENERATION:
        left = costs.scoring_stretch * scoring_rest(rollouts)
        beside = 0.0 if sizes.placement.share_device(ACTOR, ENGINE) else seconds["logprobs"] + seconds["values"]
        seconds["reference"] = max(left - beside, 0.0)
    elif home == ACTOR:
        seconds["reference"] = costs.reference * of_replica
    seconds["update"] = costs.update * of_replica + costs.optimizer * sizes.updates_per_step
    if sizes.draft_memory.actor and config.speculation.refresh_every:
        seconds["draft"] = costs.refreshes * config.speculation.refresh_seconds / config.speculation.refresh_every
    seconds["reshard"] = costs.reshard
    seconds = {phase: value for phase, value in seconds.items() if value > 0}
    bound_by = {phase: costs.bounds[phase] for phase in seconds if phase in costs.bounds}
    return StepForecast(seconds, bound_by, tokens, costs.source)


def scoring_rest(rollouts: Sequence[SimulatedRollout]) -> float:
    """Mean seconds in which the reference scores the last samples after a rollout.

    The seconds differ by half from rollout to rollout; of a dozen, the mean is known better than the median.
    """
    return statistics.fmean(one.makespan_with_scoring - one.makespan for one in rollouts)


def simulated_rollouts(
    config: RunConfig, sizes: Sizes, costs: StepCosts, workloads: Sequence[Workload], earlier: Sequence[Workload]
) -> list[SimulatedRollout]:
    """Simulate these rollouts with the mechanisms that the run uses; lengths are predicted from the `earlier` ones."""
    free = not config.trainer.deterministic
    moves = free and config.reallocation.policy == "adaptive"
    mechanism = Mechanism(
        queued=free and config.reallocation.policy in ("queue", "adaptive"),
        moves=moves,
        fuses=moves and frozen_home(config) == GENERATION,
        drafts=costs.engine.drafting is not None and config.speculation.policy != "off",
    )
    curves = replace(costs.engine, slots=config.rollout.max_running_requests)

    def rollout(workload: Workload, how: Mechanism, pause: float) -> SimulatedRollout:
        return simulate(how, workload, sizes.engines, curves, start="even", plan_seconds=pause, earlier=earlier)

    alone = rollout(workloads[0], replace(mechanism, moves=False, fuses=False), math.inf)
    pause = max(config.rollout.poll_interval, alone.makespan / PLANS)
    return [rollout(workload, mechanism, pause) for workload in workloads]
