"""What the phases of a training step cost on some hardware: measured in a run, or computed from a roofline."""

from __future__ import annotations

import json
import math
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

_HOW = "make it with python -m tools.calibrate RUN --out FILE."


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

    def draw(self, groups: int, members: int, seed: int) -> Workload:
        """A rollout of groups drawn at random, and of each as many samples as asked for, with repetition."""
        generator = np.random.default_rng(seed)
        chosen = generator.integers(len(self.prompts), size=groups)
        lengths = [generator.choice(self.responses[group], members) for group in chosen.tolist()]
        prompts = np.repeat(np.array(self.prompts, np.int64)[chosen], members)
        return _workload(prompts, np.concatenate(lengths).astype(np.int64), members, self.limit)


@dataclass(frozen=True)
class AssumedLengths:
    """Lengths by a law, where no run has been measured."""

    law: LengthDistribution

    def draw(self, groups: int, members: int, seed: int) -> Workload:
        """A random rollout."""
        lengths = self.law.draw(groups, members, np.random.default_rng(seed))
        return _workload(np.full(len(lengths), self.law.prompt, np.int64), lengths, members, self.law.limit)


@dataclass(frozen=True)
class StepCosts:
    """Costs of a step's phases. All but `stretch` are seconds.

    Attributes:
        engine: costs of an engine and, as `scoring_...`, of a device that computes the reference's log-probabilities.
        lengths: of prompts and responses.
        rollout_start: of a rollout outside its engines: requests, the first and the last report.
        stretch: a real rollout's time over that of a simulated one, which leaves out waits for the driver, plans, and
            processes that share a core.
        reward: of the reward function, for each sample.
        reference: of the reference on the actor's ranks, for each token of a data-parallel replica.
        logprobs: of the actor's log-probabilities, for each token of a data-parallel replica.
        update: of forward and backward pass, for each token of a data-parallel replica.
        optimizer: of an optimizer step with the exchange of gradients.
        reshard: of a weight update of all engines.
        bounds: by phase, what its time is bound by, e.g. "memory bandwidth"; empty if that was not found out.
        source: where the costs come from: `kind` ("measured" or "roofline") and what they were made from.
        settings: options by name that the run to be predicted must share; empty for a roofline.
    """

    engine: CostCurves
    lengths: MeasuredLengths | AssumedLengths
    rollout_start: float
    stretch: float
    reward: float
    reference: float
    logprobs: float
    update: float
    optimizer: float
    reshard: float
    bounds: Mapping[str, str] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def check_for(self, config: RunConfig, file: str) -> None:
        """Raises UserError if they were measured with other settings than this run's."""
        for name, measured in self.settings.items():
            wanted = setting(config, name)
            if wanted != measured:
                raise UserError(
                    f"The costs in {file} were measured with {name}={measured}, and this run has {wanted}: measure a "
                    "run with the same settings (python -m tools.calibrate), or leave out cluster.costs."
                )


def setting(config: RunConfig, name: str) -> Any:
    """The value of an option by its name, e.g. "actor.dtype"."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def write_costs(costs: StepCosts, path: Path) -> None:
    """Write measured costs as JSON. Raises OSError."""
    path.write_text(json.dumps(asdict(costs)) + "\n", encoding="utf-8")


def read_costs(path: Path) -> StepCosts:
    """Read measured costs. Raises UserError if the file is missing or invalid."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cluster.costs={path} cannot be read ({error.strerror}): {_HOW}") from None
    except ValueError:
        raise UserError(f"cluster.costs={path} is not a JSON file: {_HOW}") from None
    try:
        seconds = {name: float(data[name]) for name in _SECONDS}
        if not all(math.isfinite(value) and value >= 0 for value in seconds.values()):
            raise ValueError("all numbers must be 0 or more")
        lengths = MeasuredLengths(**data["lengths"])
        if not lengths.prompts or len(lengths.prompts) != len(lengths.responses) or not all(lengths.responses):
            raise ValueError("lengths need a list of responses for each prompt, none of them empty")
        return StepCosts(
            engine=curves_of(data["engine"]),
            lengths=lengths,
            **seconds,
            bounds=dict(data["bounds"]),
            source=dict(data["source"]),
            settings=dict(data["settings"]),
        )
    except KeyError as error:
        raise UserError(f"cluster.costs={path} lacks {error.args[0]}: {_HOW}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"cluster.costs={path} is invalid ({error}): {_HOW}") from None


_SECONDS = ("rollout_start", "stretch", "reward", "reference", "logprobs", "update", "optimizer", "reshard")


def _workload(prompts: Ints, lengths: Ints, members: int, limit: int) -> Workload:
    groups = np.arange(len(lengths), dtype=np.int64) // members
    return Workload(groups, prompts, lengths, limit)
