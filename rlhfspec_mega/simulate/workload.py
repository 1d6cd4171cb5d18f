"""The samples of a simulated rollout, drawn from typical length distributions, and the predictions for policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.planning.lengths import LengthPredictor
from rlhfspec_mega.planning.rollout_state import Floats, Ints
from rlhfspec_mega.rollout.assignment import assign
from rlhfspec_mega.types import GenerationRequest


@dataclass(frozen=True)
class LengthDistribution:
    """A lognormal distribution of response lengths, clipped at a limit; sigma 0 makes all lengths equal.

    Attributes:
        median: tokens.
        sigma: standard deviation of log length.
        correlation: between the log lengths of two samples of one group.
        limit: longest response, in tokens.
        prompt: tokens of a prompt.
    """

    median: float
    sigma: float
    correlation: float
    limit: int
    prompt: int

    def scaled(self, factor: float) -> LengthDistribution:
        """The distribution with all lengths, including the prompt's, multiplied by `factor`."""
        limit, prompt = (max(round(tokens * factor), 1) for tokens in (self.limit, self.prompt))
        return replace(self, median=self.median * factor, limit=limit, prompt=prompt)

    def draw(self, groups: int, members: int, generator: np.random.Generator) -> Ints:
        """Random lengths [groups * members], group by group; from 1 to the limit."""
        shared = generator.standard_normal((groups, 1)) * self.correlation**0.5
        own = generator.standard_normal((groups, members)) * (1.0 - self.correlation) ** 0.5
        lengths = np.rint(self.median * np.exp(self.sigma * (shared + own)))
        return np.clip(lengths, 1, self.limit).astype(np.int64).reshape(-1)


# chat: conversations as in LMSYS. reasoning: RL on mathematics, where members of a group have similar lengths. short:
# the fixed 480 tokens of APP (arXiv 2312.11819), a control without a long tail.
LENGTH_DISTRIBUTIONS = {
    "chat": LengthDistribution(median=119, sigma=0.77, correlation=0.0, limit=4096, prompt=128),
    "reasoning": LengthDistribution(median=1300, sigma=0.99, correlation=0.6, limit=32768, prompt=256),
    "short": LengthDistribution(median=480, sigma=0.0, correlation=0.0, limit=480, prompt=128),
}
STARTS = ("even", "skewed")


@dataclass(frozen=True)
class Workload:
    """The samples of a rollout, one entry each; members of a group are next to each other.

    Attributes:
        groups: group of the sample, numbered from 0.
        prompts: number of prompt tokens.
        lengths: response tokens that the sample will have; policies do not see them.
        limit: most tokens of a response.
    """

    groups: Ints
    prompts: Ints
    lengths: Ints
    limit: int

    @property
    def totals(self) -> Floats:
        """Tokens of prompt and response together, [samples]."""
        return (self.prompts + self.lengths).astype(np.float64)


def draw_workload(distribution: LengthDistribution, samples: int, members: int, seed: int) -> Workload:
    """A random workload in groups of `members`. Raises UserError unless `samples` is a multiple of `members`."""
    if members < 1 or samples < 1 or samples % members:
        raise UserError(f"{samples} samples are not whole groups of {members}: choose a multiple of {members}.")
    count = samples // members
    lengths = distribution.draw(count, members, np.random.default_rng(seed))
    groups = np.repeat(np.arange(count, dtype=np.int64), members)
    return Workload(groups, np.full(samples, distribution.prompt, np.int64), lengths, distribution.limit)


def start_places(workload: Workload, engines: int, start: str) -> Ints:
    """The engine [samples] on which each sample begins: "even", as a real rollout assigns samples, or "skewed".

    A skewed start puts the longest samples on the first engine, as many as an even share, and assigns the others evenly
    to the other engines. With one engine, both are the same.
    """
    count = len(workload.lengths)
    places = np.zeros(count, np.int64)
    rest, first = np.arange(count), 0
    if start == "skewed" and engines > 1:
        by_length = np.argsort(-workload.lengths, kind="stable")
        rest, first = np.sort(by_length[-(-count // engines) :]), 1
    requests = [
        GenerationRequest(str(index), str(group), (), 0, workload.limit)
        for index, group in zip(rest.tolist(), workload.groups[rest].tolist(), strict=True)
    ]
    for engine, share in enumerate(assign(requests, engines - first), start=first):
        places[[int(request.sample_id) for request in share]] = engine
    return places


class Predictions(Protocol):
    """Predictions of remaining tokens, which may learn from the samples that have ended."""

    def finished(self, sample: int, tokens: int) -> None:
        """Learn that a sample has ended with so many response tokens."""

    def remaining(self, samples: Ints, generated: Ints) -> Floats:
        """Predicted remaining tokens [n], at least 1, of unfinished samples with `generated` [n] tokens so far."""


class Oracle:
    """The true remaining tokens: an upper bound on what predictions are worth."""

    def __init__(self, workload: Workload) -> None:
        self._lengths = workload.lengths

    def finished(self, sample: int, tokens: int) -> None:
        """Nothing to learn."""

    def remaining(self, samples: Ints, generated: Ints) -> Floats:
        return np.maximum(self._lengths[samples] - generated, 1).astype(np.float64)


class Learned:
    """Predictions of `LengthPredictor`, as in a real run.

    Args:
        earlier: rollouts of other prompts that it has learnt from before this one.
    """

    def __init__(self, workload: Workload, earlier: Sequence[Workload] = ()) -> None:
        self._groups = workload.groups
        self._predictor = LengthPredictor(workload.limit)
        for number, past in enumerate(earlier):
            self._predictor.begin(_keys(past, f"earlier {number}"))
            for group, length in zip(past.groups.tolist(), past.lengths.tolist(), strict=True):
                self._predictor.finished(group, length)
            self._predictor.end()
        self._predictor.begin(_keys(workload, "now"))

    def finished(self, sample: int, tokens: int) -> None:
        self._predictor.finished(int(self._groups[sample]), tokens)

    def remaining(self, samples: Ints, generated: Ints) -> Floats:
        return self._predictor.predict(self._groups[samples], generated)


def _keys(workload: Workload, rollout: str) -> list[str]:
    return [f"{rollout}, prompt {group}" for group in range(int(workload.groups.max()) + 1)]
