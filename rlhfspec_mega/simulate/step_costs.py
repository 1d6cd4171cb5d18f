"""What the phases of a training step cost on some hardware: measured in a run, or computed from a roofline."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlhfspec_mega.config.schema.run import RunConfig
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.planning.rollout_state import Ints
from rlhfspec_mega.simulate.curves import CostCurves, curves_of
from rlhfspec_mega.simulate.workload import LengthDistribution, Workload

# Rollouts that are simulated; lengths are predicted from the first. The longest sample of a rollout varies by half, so
# that the median of a dozen is off by a tenth.
ROLLOUTS, MEASURED_ROLLOUTS = 6, 48
_HOW = "make it with python -m tools.calibrate RUN --out FILE."
# Options that the cost of a phase depends on: a run whose step is to be predicted must have these in common with the
# measured one. "a>0" stands for whether option a is above 0.
SHARED = (
    "model.name",
    "model.path",
    "model.architecture",
    "model.hidden_size",
    "model.num_layers",
    "model.num_heads",
    "model.num_kv_heads",
    "model.head_dim",
    "model.ffn_size",
    "model.vocab_size",
    "cluster.device",
    "cluster.gpu.name",
    "cluster.threads_per_worker",
    "launcher.kind",
    "placement.mode",
    "placement.reference",
    "placement.reference_tensor_parallel",
    "algorithm.kl_coef>0",
    "algorithm.adv_estimator",
    "critic.path",
    "critic.tensor_parallel",
    "critic.pipeline_parallel",
    "actor.dtype",
    "actor.tensor_parallel",
    "actor.pipeline_parallel",
    "actor.virtual_pipeline",
    "actor.sequence_parallel",
    "actor.recompute",
    "actor.overlap_p2p",
    "actor.batch_p2p",
    "actor.logprob_chunk",
    "trainer.max_tokens_per_microbatch",
    "trainer.sequence_packing",
    "trainer.deterministic",
    "rollout.engine",
    "rollout.dtype",
    "rollout.temperature",
    "rollout.max_prompt_tokens",
    "rollout.max_new_tokens",
    "rollout.chunked_prefill_size",
    "rollout.sglang.tensor_parallel",
    "rollout.sglang.mem_fraction_static",
    "rollout.sglang.enable_memory_saver",
    "rollout.sglang.trees",
    "rollout.sglang.engine_kwargs",
    "speculation.policy",
    "speculation.draft_model_path",
    "speculation.max_num_steps",
    "speculation.max_num_draft_tokens",
    "speculation.topk",
    "speculation.num_steps",
    "speculation.num_draft_tokens",
    "reallocation.policy",
    "resharding.transport",
    "resharding.bucket_mib",
    "reward.function",
    "data.kind",
    "data.train",
)


@dataclass(frozen=True)
class MeasuredLengths:
    """Lengths of a run's samples, group by group.

    Attributes:
        prompts: prompt tokens of each group.
        responses: response tokens of each group's samples.
        limit: most tokens of a response.
    """

    prompts: list[int]
    responses: list[list[int]]
    limit: int

    def draw(self, groups: int, members: int) -> list[Workload]:
        """Rollouts of so many groups, and of each group so many samples, in random order.

        Together they hold each group about equally often. Samples of a group repeat in a rollout only where there are
        too few: drawing with repetition would often miss the longest, which a rollout waits for.
        """
        generator, known = np.random.default_rng(0), len(self.prompts)
        rounds = [generator.permutation(known) for _ in range(-(-MEASURED_ROLLOUTS * groups // known))]
        parts = np.concatenate(rounds)[: MEASURED_ROLLOUTS * groups].reshape(MEASURED_ROLLOUTS, groups)
        return [self._rollout(part, members, generator) for part in parts]

    def _rollout(self, chosen: Ints, members: int, generator: np.random.Generator) -> Workload:
        known = [self.responses[group] for group in chosen.tolist()]
        lengths = [generator.choice(one, members, replace=members > len(one)) for one in known]
        prompts = np.repeat(np.array(self.prompts, np.int64)[chosen], members)
        return _workload(prompts, np.concatenate(lengths).astype(np.int64), members, self.limit)


@dataclass(frozen=True)
class AssumedLengths:
    """Lengths by a law, where no run has been measured."""

    law: LengthDistribution

    def draw(self, groups: int, members: int) -> list[Workload]:
        """Random rollouts."""
        return [self._rollout(groups, members, seed) for seed in range(ROLLOUTS)]

    def _rollout(self, groups: int, members: int, seed: int) -> Workload:
        lengths = self.law.draw(groups, members, np.random.default_rng(seed))
        return _workload(np.full(len(lengths), self.law.prompt, np.int64), lengths, members, self.law.limit)


@dataclass(frozen=True)
class StepCosts:
    """Costs of a step's phases, in seconds but for the two stretches and the two shares at the end of the list.

    Attributes:
        engine: costs of an engine and, as `scoring_...`, of a device that computes the reference's log-probabilities.
        lengths: of prompts and responses.
        rollout_start: of a rollout outside its engines: requests, the first and the last report.
        stretch: a real rollout's time over that of a simulated one, which leaves out waits for the driver, plans, and
            processes that share a core.
        scoring_stretch: the same of the time in which a reference on generation devices scores the last samples after
            a rollout.
        reward: of the reward function, for each sample.
        reference: of the reference on the actor's ranks, for each token of a data-parallel replica.
        logprobs: of the actor's log-probabilities, for each token of a data-parallel replica.
        values: of the critic's values, for each token of a data-parallel replica of the actor; 0 without a critic.
        update: of forward and backward pass of the models that learn, for each token of a data-parallel replica.
        optimizer: of an optimizer step of each of them, with the exchange of gradients.
        reshard: of a weight update of all engines.
        logprob_passes: share of the steps in which the actor's log-probabilities have a pass of their own, of a run in
            which only the draft needs it; else 1.
        refreshes: share of the draft's due refreshes that take place; see `planning.refresh_schedule`.
        bounds: by phase, what its time is bound by, e.g. "memory bandwidth"; empty if that was not found out.
        source: where the costs come from: `kind` ("measured" or "roofline") and what they were made from.
        settings: by name the options of SHARED in the measured run; empty for a roofline.
    """

    engine: CostCurves
    lengths: MeasuredLengths | AssumedLengths
    rollout_start: float
    stretch: float
    scoring_stretch: float
    reward: float
    reference: float
    logprobs: float
    values: float
    update: float
    optimizer: float
    reshard: float
    logprob_passes: float = 1.0
    refreshes: float = 1.0
    bounds: Mapping[str, str] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def check_for(self, config: RunConfig, file: str) -> None:
        """Raises UserError if they were measured with other settings than this run's, or do not say with which."""
        missing = [name for name in SHARED if name not in self.settings]
        if missing:
            raise UserError(
                f"The costs in {file} do not say with which {missing[0]} they were measured: measure again (python -m "
                "tools.calibrate), or leave out cluster.costs."
            )
        for name in SHARED:
            measured, wanted = self.settings[name], setting(config, name)
            if wanted != measured:
                raise UserError(
                    f"The costs in {file} were measured with {name}={measured}, and this run has {wanted}: measure a "
                    "run with the same settings (python -m tools.calibrate), or leave out cluster.costs."
                )


def setting(config: RunConfig, name: str) -> Any:
    """What SHARED has under this name: the value of an option, e.g. "actor.dtype", or whether it is above 0."""
    name, compared, _ = name.partition(">")
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value > 0 if compared else value


def write_costs(costs: StepCosts, path: Path) -> None:
    """Write measured costs as JSON. The file appears when it is complete; until then an older one stays.

    Raises OSError.
    """
    text, path = json.dumps(asdict(costs)) + "\n", path.resolve()
    if path.exists() and not path.is_file():  # a device or a pipe must not be replaced by a file
        path.write_text(text, encoding="utf-8")
        return
    partial = path.parent / f".{path.name}.partial-{os.getpid()}"
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_costs(path: Path) -> StepCosts:
    """Read measured costs. Raises UserError if the file is missing or invalid."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cluster.costs={path} cannot be read ({error.strerror}): {_HOW}") from None
    except ValueError:
        raise UserError(f"cluster.costs={path} is not a JSON file: {_HOW}") from None
    try:
        return _costs_of(data)
    except KeyError as error:
        raise UserError(f"cluster.costs={path} lacks {error.args[0]}: {_HOW}") from None
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(f"cluster.costs={path} is invalid ({error}): {_HOW}") from None


def _costs_of(data: Mapping[str, Any]) -> StepCosts:
    """Raises KeyError for what is missing; TypeError, ValueError, AttributeError, OverflowError for what is invalid."""
    seconds = {name: float(data[name]) for name in _SECONDS}
    if not all(math.isfinite(value) and value >= 0 for value in seconds.values()):
        raise ValueError("all numbers must be 0 or more")
    lengths = MeasuredLengths(**data["lengths"])
    _check_lengths(lengths)
    source, settings = dict(data["source"]), dict(data["settings"])
    if source["kind"] != "measured" or not isinstance(source["run"], str):
        raise ValueError("its source is no measured run")
    unknown = [name for name in settings if name not in SHARED]
    if unknown:
        raise ValueError(f"its settings name {unknown[0]}, which is none that costs depend on")
    return StepCosts(
        engine=curves_of(data["engine"]),
        lengths=lengths,
        **seconds,
        bounds=dict(data["bounds"]),
        source=source,
        settings=settings,
    )


def _check_lengths(lengths: MeasuredLengths) -> None:
    """Raise TypeError or ValueError for lengths that no run has."""
    if not lengths.prompts or len(lengths.prompts) != len(lengths.responses) or not all(lengths.responses):
        raise ValueError("lengths need a list of responses for each prompt, none of them empty")
    if type(lengths.limit) is not int or lengths.limit < 1:
        raise ValueError("the limit of lengths must be a whole number of tokens above 0")
    responses = [length for group in lengths.responses for length in group]
    if not all(type(length) is int and length >= 0 for length in (*lengths.prompts, *responses)):
        raise ValueError("lengths must be whole numbers of tokens, 0 or more")
    if max(responses) > lengths.limit:
        raise ValueError(f"a response is longer than the limit of {lengths.limit} tokens")


_SECONDS = (
    *("rollout_start", "stretch", "scoring_stretch", "reward", "reference"),
    *("logprobs", "values", "update", "optimizer", "reshard"),
    *("logprob_passes", "refreshes"),
)


def _workload(prompts: Ints, lengths: Ints, members: int, limit: int) -> Workload:
    groups = np.arange(len(lengths), dtype=np.int64) // members
    return Workload(groups, prompts, lengths, limit)
