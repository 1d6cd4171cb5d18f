"""All sources of a run's rewards, added up with their weights, and what becomes of samples that have none."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol

from rlhfspec_mega.config.schema.reward import RewardConfig
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.reward.function import FunctionReward
from rlhfspec_mega.reward.remote import RemoteReward
from rlhfspec_mega.reward.runner import RewardRunner
from rlhfspec_mega.reward.score import RewardFailure, RewardScore
from rlhfspec_mega.types import Sample

FAILURE_FILE = "reward_failure.txt"
FUNCTION, REMOTE, MODEL = "function", "remote", "model"  # names of sources in metrics

logger = logging.getLogger(__name__)


class Source(Protocol):
    """Scores samples beside generation."""

    name: str  # the subject of messages

    def submit(self, samples: Sequence[Sample]) -> list[Future[RewardScore | RewardFailure]]:
        """Start scoring samples that have ended."""

    def close(self) -> None:
        """End what the source has started."""


class Weighted(NamedTuple):
    """A source and its weight in the reward."""

    source: Source
    weight: float


class Rewards:
    """Use as a context manager around the run.

    Args:
        directory: of the run; the first failure is written there.
        in_order: score samples in the order of the step and not in that of their ends, so that a function with a state
            gives the same rewards again.

    Raises:
        UserError: a reward function that cannot be imported, or a service that does not answer.
    """

    def __init__(self, config: RewardConfig, directory: Path, in_order: bool = False) -> None:
        self._max_failures, self._directory, self.in_order = config.max_failures, directory, in_order
        self.model_weight = config.model.weight
        self.sources: dict[str, Weighted] = {}
        with ExitStack() as stack:
            if config.function is not None:
                function = FunctionReward(RewardRunner(config.function, config.time_limit, config.arguments))
                stack.callback(function.close)
                self.sources[FUNCTION] = Weighted(function, config.weight)
            remote = config.remote
            if remote.url is not None:
                service = RemoteReward(remote.url, remote.batch_size, remote.timeout, remote.deadline)
                stack.callback(service.close)
                self.sources[REMOTE] = Weighted(service, remote.weight)
            self._stack = stack.pop_all()

    def __enter__(self) -> Rewards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def begin(self) -> PendingRewards:
        """Start with the samples of a rollout."""
        return PendingRewards(self)

    def note_failures(self, failures: Sequence[tuple[Sample, str, RewardFailure]], count: int) -> None:
        """Tell the user of (sample, source's name, failure) among `count` samples, and write the first to a file.

        Raises UserError if they are too many.
        """
        if not failures:
            return
        sample, source, first = failures[0]
        path = self._directory / FAILURE_FILE
        path.write_text(
            f"{source} {first.message}\nsample: {sample.sample_id}\nprompt: {sample.prompt.text}\n"
            f"response: {sample.response}\nanswer: {sample.prompt.answer}\n{first.trace}",
            encoding="utf-8",
            errors="backslashreplace",
        )
        kinds = ", ".join(f"{kind} {n}" for kind, n in sorted(Counter(one.kind for *_, one in failures).items()))
        have = f"{len(failures)} of {count} samples have no reward ({kinds}). The first, {sample.sample_id}: {source}"
        if len(failures) > self._max_failures * count:
            raise UserError(
                f"{have} {first.message}. More than reward.max_failures={self._max_failures:g} of a step failed; the "
                f"sample and the trace are in {path}."
            )
        logger.warning("%s %s. They are left out of the update; see %s.", have, first.message, path)


class PendingRewards:
    """The rewards of one rollout's samples, from each sample's end to the rewards of all."""

    def __init__(self, rewards: Rewards) -> None:
        self._rewards = rewards
        self._futures: dict[str, dict[str, Future[RewardScore | RewardFailure]]] = {}  # by sample id and source

    def add(self, sample: Sample) -> None:
        """A sample has ended: functions and services begin to score it, unless they keep to the order of the step."""
        if not self._rewards.in_order:
            self._submit(sample)

    def finish(self, samples: Sequence[Sample], of_model: Mapping[str, float] | None = None) -> dict[str, float]:
        """Wait for all scores, and fill in reward, exactness and failure of each sample.

        Args:
            of_model: the reward model's score by sample id, if there is a reward model.

        Returns the means of all sources, if there are several, and numbers of failures by kind.

        Raises:
            UserError: too many samples have no reward.
            RewardServiceAway: the remote service stays away.
        """
        for sample in samples:
            if sample.sample_id not in self._futures:
                self._submit(sample)
        failures, parts = [], dict[str, list[float]]()
        for sample in samples:
            sample.reward, sample.exact, sample.failure = 0.0, False, ""
            for name, future in self._futures[sample.sample_id].items():
                weighted, result = self._rewards.sources[name], future.result()
                if isinstance(result, RewardFailure):
                    if not sample.failure:
                        failures.append((sample, weighted.source.name, result))
                        sample.failure = result.kind.value
                    continue
                sample.reward += weighted.weight * result.value
                sample.exact |= result.exact and name == next(iter(self._rewards.sources))
                parts.setdefault(name, []).append(result.value)
            if of_model is not None:
                sample.reward += self._rewards.model_weight * of_model[sample.sample_id]
                parts.setdefault(MODEL, []).append(of_model[sample.sample_id])
            if sample.failure:
                sample.reward, sample.exact = 0.0, False
        self._rewards.note_failures(failures, len(samples))
        means = {f"reward/{name}_mean": sum(values) / len(values) for name, values in parts.items()}
        kinds = Counter(f"reward/failures_{sample.failure}" for sample in samples if sample.failure)
        return (means if len(means) > 1 else {}) | {name: float(count) for name, count in kinds.items()}

    def _submit(self, sample: Sample) -> None:
        self._futures[sample.sample_id] = {
            name: weighted.source.submit([sample])[0] for name, weighted in self._rewards.sources.items()
        }
